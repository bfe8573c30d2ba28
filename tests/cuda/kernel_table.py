"""Print, as Markdown, which kernels of the Kimi-K2.5 path vLLM's wheel holds as sm_120 code and which as PTX only.

Runs inside the CUDA image; needs no GPU. A kernel that is PTX only runs too, but the driver compiles it at first use.
"""

import re
import subprocess
import sys
from collections import Counter, defaultdict
from importlib.util import find_spec
from pathlib import Path

# Triton brings the tool; CUDA's own wheels do not.
CUOBJDUMP = Path(find_spec("triton").origin).parent / "backends/nvidia/bin/cuobjdump"
VLLM = Path(find_spec("vllm").origin).parent
TARGET = "sm_120"

# What Kimi-K2.5 in INT4 with an EAGLE-3 drafter launches from compiled code, on TP8: (library, kernel, what it is for).
KIMI_PATH = [
    ("_moe_C_stable_libtorch", "vllm::moe::(single_group_topk|grouped_topk_fused)", "choosing experts"),
    ("_moe_C_stable_libtorch", "vllm::moe::(moe_align_block_size|count_and_sort)", "sorting tokens by expert"),
    ("_C_stable_libtorch", "marlin::gptq_marlin_repack_kernel", "INT4 experts, repacked while loading"),
    ("_moe_C_stable_libtorch", "marlin_moe_wna16::Marlin(?!Default)", "INT4 experts"),
    ("_moe_C_stable_libtorch", "vllm::moe::moe_sum", "sum of the experts"),
    ("_C_stable_libtorch", "vllm::act_and_mul_kernel(?!_with)", "SiLU and product"),
    ("_C_stable_libtorch", "vllm::(fused_add_)?rms_norm_kernel", "normalisation"),
    ("_C_stable_libtorch", "vllm::rotary_embedding_kernel", "positions"),
    ("_C_stable_libtorch", "vllm::concat_and_cache_mla_kernel", "KV cache, MLA"),
    ("_C_stable_libtorch", "vllm::gather_and_maybe_dequant_cache", "KV cache, context of a chunked prefill"),
    ("_C_stable_libtorch", "vllm::merge_attn_states_kernel", "attention, joining parts"),
    ("_C_stable_libtorch", "vllm::reshape_and_cache_flash_kernel", "KV cache, Llama drafter"),
    ("vllm_flash_attn/_vllm_fa2_C", "flash::flash_fwd_kernel", "prefill"),
    ("vllm_flash_attn/_vllm_fa2_C", "flash::flash_fwd_splitkv", "prefill with cached context; Llama drafter"),
    ("_C_stable_libtorch", "vllm::apply_repetition_penalties_kernel", "sampling"),
]  # fmt: skip


def dump(option: str, library: Path) -> str:
    """Output of cuobjdump."""
    return subprocess.run([CUOBJDUMP, option, library], stdout=subprocess.PIPE, text=True, check=True).stdout


def architectures(library: Path) -> dict[str, tuple[set[str], set[str]]]:
    """For each kernel's symbol, what it is compiled for, and what its PTX is for."""
    compiled: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for option, entry, kind in (("-symbols", r".*STO_ENTRY\s+(\S+)", 0), ("-ptx", r".*\.entry ([\w$]+)", 1)):
        architecture = ""
        for line in dump(option, library).splitlines():
            if line.startswith("arch = "):
                architecture = line.split()[-1]
            elif found := re.match(entry, line):
                compiled[found[1]][kind].add(architecture)
    return compiled


def readable(symbol: str) -> str:
    """Name with its namespaces, from the length-prefixed parts of a mangled symbol; enough to find a kernel by."""
    rest = symbol.removeprefix("_Z").removeprefix("N")
    parts = []
    while length := re.match(r"\d+", rest):
        start, end = length.end(), length.end() + int(length[0])
        parts.append(rest[start:end])
        rest = rest[end:]
    return "::".join(part for part in parts if not part.startswith("_GLOBAL"))


def state(machine_code: set[str], ptx: set[str]) -> str:
    """How a kernel reaches the target."""
    # sm_120f and sm_120a as well, which run on it too.
    if any(architecture.startswith(TARGET) for architecture in machine_code):
        return "code"
    return "ptx" if ptx else "other"


def main() -> None:
    libraries = {name: architectures(next(VLLM.glob(f"{name}.*so"))) for name in sorted({row[0] for row in KIMI_PATH})}
    print("| kernels | in | for | sm_120 code | PTX only | other GPUs only |\n|---|---|---|---:|---:|---:|")
    for library, pattern, purpose in KIMI_PATH:
        kernels = {s: kinds for s, kinds in libraries[library].items() if re.match(pattern, readable(s))}
        if not kernels:
            sys.exit(f"{library}: no kernel matches {pattern!r}")
        count = Counter(state(*kinds) for kinds in kernels.values())
        name = re.sub(r"\(\?!.*?\)", "", pattern).replace("|", " \\| ")
        print(
            f"| `{name}` | `{Path(library).name}` | {purpose} | {count['code']} | {count['ptx']} | {count['other']} |"
        )


if __name__ == "__main__":
    main()
