"""A complete Kimi-K2.5 with two EAGLE-3 drafters in a few megabytes, for machines without a GPU.

`target` has the architecture, head sizes, vision tower, chat template and special tokens of the real model, and
`target-tiktoken` is the same with the tokenizer in the real repository's form. What the model says is known in advance
(`expected_answer`, `expected_continuation`); how, `weights` explains.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from aerie.checkpoint.tiny import configs, tokenizer
from aerie.checkpoint.tiny.script import expected_answer, expected_continuation

__all__ = ["DirectoryTakenError", "expected_answer", "expected_continuation", "write_tiny"]


class DirectoryTakenError(Exception):
    """The directory to write to holds something else."""


def write_tiny(out: Path, seed: int) -> bool:
    """Write the target, in both forms, and both drafters under `out`; the same seed gives the same bytes.

    They appear at once or not at all. Returns False where they were there already, byte for byte, and nothing changed.
    Raises DirectoryTakenError where `out` holds anything else, OSError where it cannot be written, and ImportError
    where torch, safetensors or tokenizers are missing.
    """
    out = out.resolve()
    if out.exists() and not out.is_dir():
        raise DirectoryTakenError(f"{out} is not a directory: give another path")
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside it, so that it is on the same file system and can be renamed.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as beside:
        unfinished = Path(beside) / out.name
        unfinished.mkdir()
        _write(unfinished, seed)
        if out.is_dir() and any(out.iterdir()):
            if _digest(out) == _digest(unfinished):
                return False
            raise DirectoryTakenError(
                f"{out} holds something other than the tiny pair of seed {seed} that this release writes: "
                "give another directory, or remove this one first"
            )
        unfinished.rename(out)
        return True


def _write(folder: Path, seed: int) -> None:
    # Torch takes a second to import, which `aerie --help` and the tests of a served text need not wait for.
    from safetensors.torch import save  # noqa: PLC0415

    from aerie.checkpoint.tiny import weights  # noqa: PLC0415

    contents = {
        "target": (configs.TARGET, weights.target_tensors),
        "drafter-mla": (configs.MLA_DRAFTER, weights.mla_drafter_tensors),
        "drafter-llama": (configs.LLAMA_DRAFTER, weights.llama_drafter_tensors),
    }
    for name, (config, tensors) in contents.items():
        model = folder / name
        model.mkdir()
        tokenizer.write_json(model / "config.json", config)
        # Not save_file, whose files only their owner may read: in an image, another user serves them.
        (model / "model.safetensors").write_bytes(save(tensors(seed), metadata={"format": "pt"}))
    target, real_form = folder / "target", folder / "target-tiktoken"
    tokenizer.write_json(target / "generation_config.json", configs.GENERATION)
    tokenizer.write_json(target / "preprocessor_config.json", configs.PREPROCESSOR)
    real_form.mkdir()
    for shared in target.iterdir():
        (real_form / shared.name).symlink_to(f"../target/{shared.name}")
    tokenizer.write_fast_form(target)
    tokenizer.write_tiktoken_form(real_form)


def _digest(folder: Path) -> str:
    """One digest over the names and contents of all files under a folder."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if not path.is_dir()):
        content = bytes(path.readlink()) if path.is_symlink() else path.read_bytes()
        digest.update(f"{path.relative_to(folder)}\0{path.is_symlink()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
