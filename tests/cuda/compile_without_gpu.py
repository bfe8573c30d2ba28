"""Load vLLM's CUDA code and compile what a start compiles, as far as it goes without a GPU; print the results as JSON.

Runs inside the CUDA image. The driver's library is missing there: the toolchain's stand-in, which has its name and
nothing else, takes its place, and loads as long as nobody calls it.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl
import vllm
from flashinfer.jit.sampling import gen_sampling_module
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaUtils
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@triton.jit
def double(x, n, BLOCK: tl.constexpr):  # noqa: N803 - as Triton's constants are written
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


def compiled_for(library: str) -> list[str]:
    listed = subprocess.run([CUOBJDUMP, "--list-elf", library], stdout=subprocess.PIPE, text=True, check=True).stdout
    return sorted({line.split(".")[-2] for line in listed.splitlines() if line.endswith(".cubin")})


def triton_kernel() -> bytes:
    source = ASTSource(double, {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {(2,): 128})
    return triton.compile(source, target=GPUTarget("cuda", 120, 32)).asm["cubin"]


def main() -> None:
    sys.setdlopenflags(os.RTLD_LAZY)
    for library in ("_C_stable_libtorch", "_moe_C_stable_libtorch", "vllm_flash_attn._vllm_fa2_C"):
        importlib.import_module(f"vllm.{library}")
    operators = [hasattr(torch.ops._C, "gptq_marlin_repack"), hasattr(torch.ops._moe_C, "moe_wna16_marlin_gemm")]
    launcher = CudaUtils().launch.__name__
    cubin = triton_kernel()
    sampling = gen_sampling_module()
    sampling.build(verbose=False)
    library = str(sampling.get_library_path())
    result = {
        "user": os.getuid(),
        "root is read-only": not os.access("/opt", os.W_OK),
        "vllm": vllm.__version__,
        "cuda": torch.version.cuda,
        "operators": operators,
        "triton launcher": launcher,
        "triton kernel is ELF": cubin[:4] == b"\x7fELF",
        "flashinfer": [library.removeprefix(os.environ["FLASHINFER_WORKSPACE_BASE"]), compiled_for(library)],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
