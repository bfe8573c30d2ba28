"""The shrunken pair beside the operator's own files."""

from __future__ import annotations

import json
import shutil

import pytest

torch = pytest.importorskip("torch", reason="the weights are made with torch, which is in the image")
transformers = pytest.importorskip("transformers", reason="loads the tokenizer as vLLM does; it is in the image")

from sparse_checkpoint import MODELS  # noqa: E402 - needs the libraries above

from aerie.checkpoint.config import read_drafter, read_target  # noqa: E402
from aerie.checkpoint.files import read_weights  # noqa: E402
from aerie.checkpoint.layout import drafter_layout, drafter_name, target_layout  # noqa: E402
from aerie.checkpoint.shrink import Profile  # noqa: E402
from aerie.checkpoint.tiny import write_tiny  # noqa: E402
from aerie.checkpoint.tiny.tokenizer import write_tiktoken_form  # noqa: E402
from aerie.rehearsal.findings import Verdict  # noqa: E402
from aerie.rehearsal.pair import TokenizerError, write_pair  # noqa: E402
from aerie.rehearsal.stand_in import stand_in_for  # noqa: E402
from aerie.rehearsal.static.whole import weights_are_whole  # noqa: E402

STAND_INS = ("tokenizer_config.json", "chat_template.jinja", "tokenization_kimi.py")


@pytest.fixture(scope="session", autouse=True)
def one_thread(tmp_path_factory):
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    out = tmp_path_factory.mktemp("tiny") / "tiny"
    write_tiny(out, 0)
    return out


def shrunken(folder, target, drafter, **options):
    folder.mkdir()
    present = read_weights(drafter).tensors.keys() or None
    return write_pair(folder, read_target(target), read_drafter(drafter), present, Profile.CPU, 1, **options)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Kimi-K2.5 without a vocabulary, but with its companions, whose names are the stand-in's, too."""
    target = tmp_path_factory.mktemp("kimi") / "target"
    shutil.copytree(MODELS / "moonshotai--Kimi-K2.5", target)
    for name in STAND_INS:
        (target / name).write_text("{}")
    return target


@pytest.fixture(scope="module")
def kimi(published):
    return shrunken(published.parent / "pair", published, MODELS / "lightseekorg--kimi-k2.5-eagle3-mla")


def test_both_are_whole_checkpoints(kimi):
    target, drafter = read_weights(kimi.target), read_weights(kimi.drafter)
    for role, weights, layout in (
        ("target", target, target_layout(read_target(kimi.target))),
        ("drafter", drafter, drafter_layout(read_drafter(kimi.drafter))),
    ):
        names = {name: drafter_name(name) if role == "drafter" else name for name in weights.tensors}
        (found,) = weights_are_whole(role, weights, layout, names)
        assert found.verdict is Verdict.PASSED


def test_a_stand_in_says_its_text(kimi):
    assert not kimi.has_own_tokenizer
    assert (kimi.thought, kimi.answer, kimi.chain.function) == (
        "Ready steady go", "Every part of the start did its work", "up",
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(kimi.target, trust_remote_code=True)
    assert len(tokenizer) == 163840
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}], tokenize=True, add_generation_prompt=True
    )
    said = tokenizer.decode(kimi.script.continuation(prompt["input_ids"][-1], 20))
    assert said == (
        "Ready steady go</think>Every part of the start did its work<|tool_calls_section_begin|><|tool_call_begin|>"
        "functions.up:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
    )


@pytest.mark.parametrize("form", ["target", "target-tiktoken"])
def test_the_tokenizer_of_ones_own(tiny, tmp_path, form):
    pair = shrunken(tmp_path / "pair", tiny / form, tiny / "drafter-llama")
    assert pair.has_own_tokenizer
    tokenizer = transformers.AutoTokenizer.from_pretrained(pair.target, trust_remote_code=True)
    said = tokenizer.decode(pair.chain.tokens)
    assert f"<think>{pair.thought}</think>{pair.answer}<|tool_calls_section_begin|>" in said
    assert f"<|tool_call_begin|>{pair.chain.function}:0<|tool_call_argument_begin|>{{}}<|tool_call_end|>" in said


def test_the_operators_files_are_linked_and_stay_as_they_are(tiny, tmp_path):
    """A Hub cache has links itself, and what nobody needs may be unreadable or a broken link."""
    blobs, target = tmp_path / "blobs", tmp_path / "snapshot"
    shutil.copytree(tiny / "target", blobs)
    target.mkdir()
    for path in blobs.iterdir():
        (target / path.name).symlink_to(path)
    (target / "README.md").symlink_to("nowhere")
    before = {path.name: path.read_bytes() for path in blobs.iterdir()}
    pair = shrunken(tmp_path / "pair", target, tiny / "drafter-mla")
    assert {path.name: path.read_bytes() for path in blobs.iterdir()} == before
    assert (pair.target / "tokenizer.json").samefile(blobs / "tokenizer.json")
    assert json.loads((pair.target / "config.json").read_text()) != json.loads(before["config.json"])
    assert not (pair.target / "model.safetensors").is_symlink()


def test_a_stand_in_overwrites_nothing(kimi, published):
    assert {(published / name).read_text() for name in STAND_INS} == {"{}"}
    assert "{}" not in {(kimi.target / name).read_text() for name in STAND_INS}


def test_a_tokenizer_that_is_elsewhere(tiny, tmp_path):
    target = tmp_path / "target"
    shutil.copytree(tiny / "target", target, ignore=shutil.ignore_patterns("token*", "chat*"))
    pair = shrunken(tmp_path / "pair", target, tiny / "drafter-mla", tokenizer=tiny / "target")
    assert pair.has_own_tokenizer
    assert not (pair.target / "tiktoken.model").exists()


def test_tokenizers_that_do_not_work(tiny, tmp_path):
    target = tmp_path / "target"
    shutil.copytree(tiny / "target", target)
    (target / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"the tokenizer in .* cannot be loaded"):
        shrunken(tmp_path / "pair", target, tiny / "drafter-mla")
    with pytest.raises(TokenizerError, match=r"is not this model's: token \d+ is not in a vocabulary of"):
        shrunken(
            tmp_path / "other", tiny / "target", tiny / "drafter-mla", tokenizer=kimi_tokenizer(tmp_path), trusted=True
        )


def test_a_tokenizer_s_code_runs_only_where_it_is_trusted(tiny, tmp_path):
    tokenizer = kimi_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="contains custom code which must be executed") as refused:
        shrunken(tmp_path / "pair", tiny / "target", tiny / "drafter-mla", tokenizer=tokenizer)
    assert "\n" not in str(refused.value)


def kimi_tokenizer(tmp_path):
    place = tmp_path / "kimi"
    place.mkdir()
    stand_in = stand_in_for(read_target(MODELS / "moonshotai--Kimi-K2.5"))
    write_tiktoken_form(place, stand_in.vocabulary, stand_in.special_id)
    return place


def test_a_folder_that_cannot_be_written(tiny, tmp_path):
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair" / "target").mkdir()
    with pytest.raises(OSError, match="File exists"):
        write_pair(tmp_path / "pair", read_target(tiny / "target"), None, None, Profile.CPU, 1)
    assert not any((tmp_path / "pair" / "target").iterdir())
