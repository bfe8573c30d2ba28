"""The tiny pair on disk: complete, small, the same bytes for the same seed, and never half there."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the weights are made with torch, which is in the image")
pytest.importorskip("tokenizers", reason="tokenizer.json is made with tokenizers, which is in the image")
safetensors = pytest.importorskip("safetensors", reason="the weights are written as safetensors")

from aerie.checkpoint.tiny import DirectoryTakenError, configs, write_tiny  # noqa: E402 - needs the libraries above
from aerie.cli import main  # noqa: E402

MODELS = ["target", "drafter-mla", "drafter-llama"]


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def shapes(model):
    with safetensors.safe_open(model / "model.safetensors", framework="pt") as tensors:
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118 - no mapping


def test_the_same_seed_gives_the_same_bytes_in_another_process(pair, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    script = "import sys; from aerie.cli import main; sys.exit(main(['model', 'tiny', '--out', sys.argv[1]]))"
    subprocess.run([sys.executable, "-c", script, tmp_path / "other"], env=environment, check=True)
    assert digests(tmp_path / "other") == digests(pair)


def test_another_seed_gives_other_weights_and_the_same_tokenizer(pair, tmp_path):
    write_tiny(tmp_path / "other", 1)
    ours, others = digests(pair), digests(tmp_path / "other")
    changed = {name for name in ours if ours[name] != others[name]}
    assert changed == {f"{model}/model.safetensors" for model in [*MODELS, "target-tiktoken"]}


def test_it_takes_less_than_20_megabytes(pair):
    assert sum(path.lstat().st_size for path in pair.rglob("*")) < 20e6


def test_any_user_may_read_it(pair):
    umask = os.umask(0)
    os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in pair.rglob("*") if path.is_file()} == {0o666 & ~umask}


def test_a_second_run_changes_nothing_and_says_so(pair, capsys):
    before = {path: path.lstat().st_mtime_ns for path in [pair, *pair.rglob("*")]}
    assert main(["model", "tiny", "--out", str(pair)]) == 0
    assert "nothing changed" in capsys.readouterr().out
    assert {path: path.lstat().st_mtime_ns for path in [pair, *pair.rglob("*")]} == before
    assert [path.name for path in pair.parent.iterdir()] == [pair.name]


@pytest.mark.parametrize("damage", [lambda out: (out / "target" / "config.json").unlink(),
                                    lambda out: (out / "drafter-mla" / "model.safetensors").write_bytes(b""),
                                    lambda out: (out / "notes.txt").write_text("mine")])  # fmt: skip
def test_a_directory_with_anything_else_is_refused_and_left_alone(tmp_path, capsys, damage):
    out = tmp_path / "tiny"
    write_tiny(out, 0)
    damage(out)
    before = digests(out)
    with pytest.raises(DirectoryTakenError, match="seed 0"):
        write_tiny(out, 0)
    assert digests(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    assert main(["model", "tiny", "--out", str(out)]) == 1
    assert "give another directory" in capsys.readouterr().err


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "tiny").write_text("mine")
    with pytest.raises(DirectoryTakenError, match="not a directory"):
        write_tiny(tmp_path / "tiny", 0)


def test_an_empty_directory_and_missing_parents_are_fine(tmp_path):
    out = tmp_path / "not" / "there" / "tiny"
    out.mkdir(parents=True)
    assert write_tiny(out, 0)
    assert {path.name for path in out.iterdir()} == {*MODELS, "target-tiktoken"}


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def no_room(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("aerie.checkpoint.tiny.tokenizer.write_fast_form", no_room)
    assert main(["model", "tiny", "--out", str(tmp_path / "tiny")]) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_help_needs_no_torch():
    script = "import sys; sys.modules['torch'] = None; from aerie.cli import main; main(['model', 'tiny', '--help'])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_torch_the_message_names_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("aerie.checkpoint.tiny.weights", "safetensors.torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert main(["model", "tiny", "--out", str(tmp_path / "tiny")]) == 1
    assert "torch" in capsys.readouterr().err


def test_both_forms_of_the_target_share_one_file_of_weights(pair):
    link = pair / "target-tiktoken" / "model.safetensors"
    assert link.readlink() == Path("../target/model.safetensors")
    assert link.samefile(pair / "target" / "model.safetensors")
    assert json.loads((pair / "target-tiktoken" / "config.json").read_text()) == configs.TARGET


def test_heads_have_the_real_sizes(pair):
    """moonshotai/Kimi-K2.5's config.json says 512, 64, 128 and 128."""
    for model, layer in (("target", "language_model.model.layers.3"), ("drafter-mla", "midlayer")):
        config = json.loads((pair / model / "config.json").read_text())
        config = config.get("text_config", config)
        heads, found = config["num_attention_heads"], shapes(pair / model)
        assert heads >= 4
        assert found[f"{layer}.self_attn.kv_a_proj_with_mqa.weight"][0] == 512 + 64
        assert found[f"{layer}.self_attn.q_b_proj.weight"][0] == heads * (128 + 64)
        assert found[f"{layer}.self_attn.kv_b_proj.weight"] == (heads * (128 + 128), 512)
        assert found[f"{layer}.self_attn.o_proj.weight"][1] == heads * 128


def test_the_drafters_read_the_layers_that_vllm_reads_by_default(pair):
    layers = configs.TARGET["text_config"]["num_hidden_layers"]
    assert layers >= 7
    assert (2, layers // 2, layers - 3) == configs.AUX_LAYERS
    named = json.loads((pair / "drafter-llama" / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"]
    assert tuple(named) == configs.AUX_LAYERS
    for drafter in ("drafter-mla", "drafter-llama"):
        assert shapes(pair / drafter)["fc.weight"] == (configs.HIDDEN_SIZE, 3 * configs.HIDDEN_SIZE)


def test_the_reduced_vocabulary_maps_to_the_targets(pair):
    with safetensors.safe_open(pair / "drafter-llama" / "model.safetensors", framework="pt") as tensors:
        d2t, t2d = tensors.get_tensor("d2t"), tensors.get_tensor("t2d")
    drafted = torch.arange(len(d2t)) + d2t
    assert len(drafted) == configs.DRAFT_VOCABULARY < configs.TARGET["text_config"]["vocab_size"]
    assert torch.equal(drafted, t2d.nonzero()[:, 0])
    assert d2t.max() > 0


def test_the_target_has_all_that_vllm_needs_beside_the_weights(pair):
    assert {path.name for path in (pair / "target").iterdir()} == {
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "preprocessor_config.json",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert {path.name for path in (pair / "target-tiktoken").iterdir()} == {
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "preprocessor_config.json",
        "tiktoken.model", "tokenization_kimi.py", "tokenizer_config.json",
    }  # fmt: skip
