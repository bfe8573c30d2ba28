"""Which implementation the engine chose of each part, and whether the real model would get the same. Pure.

A shrunken model proves something of the real one only where both run the same code. vLLM 0.32.0 says in its log what it
chose; what it would choose for the real model follows from its rules for the chip, the model and the settings.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from aerie.rehearsal.findings import Finding, failed, passed, skipped, warned
from aerie.rehearsal.static.arguments import Setup
from aerie.rehearsal.static.hardware import Hardware
from aerie.startup.lines import Line

ATTENTION, DRAFTER = "attention backend", "drafter's attention backend"
PREFILL, EXPERTS, SAMPLER = "prefill backend", "experts backend", "sampler"
RUNNER, GRAPHS = "model runner", "captured graphs"

# Both forms of vllm/platforms/cuda.py, and that of cpu.py.
_ATTENTION = re.compile(r"Using (?:AttentionBackendEnum\.)?([A-Z0-9_]+)(?: attention backend out of | backend\.)")
_DRAFTER_COMES = ("Using Eagle3 auxiliary layers from", "Loading drafter model")
_CAPTURING = re.compile(r"Capturing CUDA graphs \((?:[\w -]+, )?([A-Z]+)\)")
_OTHERS = {
    PREFILL: re.compile(r"Using (\w+) MLA prefill backend"),
    EXPERTS: re.compile(r"Using '?([\w ]+?)'? (WNA16|NvFp4|Unquantized|Fp8) MoE backend"),
    SAMPLER: re.compile(r"(FlashInfer) for top-p & top-k sampling|FlashInfer top-p/top-k sampling (?:dis|unav)"),
    RUNNER: re.compile(r"[Uu]sing (?:the )?(V[12]) [Mm]odel [Rr]unner"),
}
_NO_GRAPHS = "Cudagraph is disabled"
_PYTORCH = "PyTorch"
_NONE = "none"

_GRAPHS_OF_MODE = {
    "FULL_AND_PIECEWISE": "FULL, PIECEWISE", "FULL_DECODE_ONLY": "FULL", "FULL": "FULL", "PIECEWISE": "PIECEWISE",
    "NONE": _NONE,
}  # fmt: skip
_OF_SETTINGS_ALONE = {SAMPLER, GRAPHS}
"""Chosen without a look at the model, so the real one gets the same in any case."""
_MARLIN_GROUPS = (32, 64, 128)
_MARLIN_WIDTHS = 128  # what the hidden size is a multiple of


@dataclass(frozen=True)
class Choice:
    """What is chosen, and the place in vLLM 0.32.0 that decides it."""

    name: str
    source: str


def chosen(lines: Iterable[Line]) -> dict[str, str]:
    """Return what the engine says in its log that it chose, of the first rank that says so."""
    found: dict[str, str] = {}
    captured: set[str] = set()
    has_drafter: set[str] = set()
    for line in lines:
        text = line.text
        # Ranks write in between one another, so each has its own before and after.
        if any(mark in text for mark in _DRAFTER_COMES):
            has_drafter.add(line.process)
        elif attention := _ATTENTION.search(text):
            found.setdefault(DRAFTER if line.process in has_drafter else ATTENTION, attention[1])
        elif _NO_GRAPHS in text:
            captured.add(_NONE)
        else:
            captured.update(_CAPTURING.findall(text))
            for part, pattern in _OTHERS.items():
                if match := pattern.search(text):
                    found.setdefault(part, " ".join(filter(None, match.groups())) or _PYTORCH)
    return found | ({GRAPHS: ", ".join(sorted(captured))} if captured else {})


def expected(setup: Setup, environment: Mapping[str, str]) -> dict[str, Choice]:
    """Return what the real model gets on the chip of `setup`; without what is not known here, empty for a CPU."""
    chip = setup.hardware.chip
    if chip is None:
        return {}
    family = chip.removeprefix("sm_")[:-1]
    found = {
        ATTENTION: Choice(_attention(setup, family), "vllm/platforms/cuda.py"),
        PREFILL: Choice(_prefill(setup, family), "vllm/platforms/interface.py"),
        EXPERTS: Choice(_experts(setup, family), "vllm/model_executor/layers/fused_moe/oracle"),
        SAMPLER: Choice(
            _PYTORCH if environment.get("VLLM_USE_FLASHINFER_SAMPLER") == "0" else "FlashInfer",
            "vllm/v1/sample/ops/topk_topp_sampler.py",
        ),
        RUNNER: Choice("V1" if environment.get("VLLM_USE_V2_MODEL_RUNNER") == "0" else "V2", "vllm/config/vllm.py"),
        GRAPHS: Choice(_graphs(setup), "vllm/config/compilation.py"),
    }
    if setup.drafter:
        found[DRAFTER] = Choice(_of_drafter(setup, family), "vllm/platforms/cuda.py")
    return {part: choice for part, choice in found.items() if choice.name}


def compare(setup: Setup, here: Hardware, environment: Mapping[str, str], lines: Iterable[Line]) -> Iterator[Finding]:
    """Yield for each part whether the engine that ran on `here` chose what the real model gets there.

    Where that is another chip than the one of `setup`, it is also told what the real model gets on that one, which was
    not proven.
    """
    seen = chosen(lines)
    there = expected(setup, environment)
    if here.chip is None:
        ran = ", ".join(f"{part} {name}" for part, name in seen.items()) or "what it chose was not said"
        yield skipped("backends", f"a CPU has its own ({ran}); {_gets(setup, there)}")
        return
    for part, choice in expected(replace(setup, hardware=here), environment).items():
        yield _judge(part, choice, seen)
    if here.chip != setup.hardware.chip:
        yield skipped("backends", f"this machine is {here.chip}; {_gets(setup, there)}")


def _judge(part: str, choice: Choice, seen: Mapping[str, str]) -> Finding:
    name = seen.get(part)
    if name is None and part == DRAFTER and choice.name == seen.get(ATTENTION):
        name = choice.name  # vLLM says the same thing once
    if name is None:
        return skipped(part, f"the engine does not say what it chose; the real model gets {choice.name}")
    if name == choice.name:
        return passed(part, f"{name}, as the real model gets", choice.source)
    if part in _OF_SETTINGS_ALONE:
        return warned(
            part,
            f"the engine chose {name}, where {choice.name} was expected of these settings",
            "read its warnings in the log: it says what it could not do",
            choice.source,
        )
    return failed(
        part,
        f"the engine chose {name}, and the real model gets {choice.name}: what ran here proves nothing of it",
        f"look for an argument or a VLLM_ variable that selects {name}, or whether this image is the pinned one",
        choice.source,
    )


def _gets(setup: Setup, there: Mapping[str, Choice]) -> str:
    if setup.hardware.chip is None:
        return "what the real model gets is told for a chip that --chip names"
    names = ", ".join(f"{part} {choice.name}" for part, choice in there.items())
    return f"on {setup.hardware.chip} the real model gets {names}"


def _asked(setup: Setup, option: str, config: str, key: str) -> str:
    """Return what an argument or a key of a config argument selects, empty where nothing does."""
    given = setup.settings.text(option) if option else None
    if given is None:
        options = setup.settings.given.get(config)
        given = options.get(key) if isinstance(options, dict) else None
    return "" if given is None or str(given).lower() == "auto" else str(given).upper()


def _attention(setup: Setup, family: str) -> str:
    if asked := _asked(setup, "attention-backend", "attention-config", "backend"):
        return asked
    match family:
        case "9":
            return "FLASHMLA" if setup.has_fp8_cache else "FLASH_ATTN_MLA"
        case "8" | "12":
            return "TRITON_MLA"
    return ""


def _of_drafter(setup: Setup, family: str) -> str:
    drafter, speculation = setup.drafter, setup.settings.speculation
    if drafter is None or speculation is None:
        return ""
    # What is asked for the target holds for the drafter, too.
    asked = speculation.text("attention_backend") or _asked(setup, "attention-backend", "attention-config", "backend")
    if asked:
        return asked.upper()
    cache = speculation.text("kv_cache_dtype") or ("fp8" if setup.has_fp8_cache else "bfloat16")
    if drafter.is_mla:
        return _attention(replace(setup, settings=replace(setup.settings, kv_dtype=cache)), family)
    if family == "12" and cache.startswith("fp8"):
        return "FLASHINFER"
    return "FLASH_ATTN" if family in ("8", "9", "12") else ""


def _prefill(setup: Setup, family: str) -> str:
    if asked := _asked(setup, "", "attention-config", "mla_prefill_backend"):
        return asked
    return "" if family == "10" else "FLASH_ATTN"


def _experts(setup: Setup, family: str) -> str:
    if family not in ("8", "9", "12"):
        return ""
    quantization = setup.target.quantization
    asked = _asked(setup, "moe-backend", "kernel-config", "moe_backend").replace("-", "_")
    if quantization is None:
        return "" if asked else f"{'FlashInfer CUTLASS' if family == '12' else 'TRITON'} Unquantized"
    if not quantization.is_packed_integers:
        return ""
    fits_marlin = (
        quantization.symmetric
        and quantization.group in _MARLIN_GROUPS
        and setup.target.hidden_size % _MARLIN_WIDTHS == 0
    )
    return f"{asked or 'MARLIN'} WNA16" if asked or fits_marlin else "TRITON WNA16"


def _graphs(setup: Setup) -> str:
    if setup.settings.eager:
        return _NONE
    asked = str(setup.settings.compilation.get("cudagraph_mode") or "FULL_AND_PIECEWISE").upper()
    # With a context that is split over ranks, TRITON_MLA's verification has no full graph.
    if setup.settings.context_parallel > 1 and setup.settings.speculation and asked != "NONE":
        asked = "PIECEWISE"
    return _GRAPHS_OF_MODE.get(asked, "")
