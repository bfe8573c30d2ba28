"""Which rehearsals have passed."""

from __future__ import annotations

import pytest

from aerie.rehearsal.remembered import Remembered, digest_of
from aerie.rehearsal.static.hardware import RTX_PRO_6000
from aerie.rehearsal.subject import read_subject


@pytest.fixture
def digest(kimi, mla_drafter):
    def of(*words, asked=("with weights",), machine="8 x RTX", environment=None):
        given = [str(kimi.directory), "--port", "8000", *words]
        subject = read_subject(given, None, mla_drafter.directory, RTX_PRO_6000, weights=False)
        return digest_of(subject, asked, machine, environment or {})

    return of


def test_the_same_has_the_same(digest):
    assert digest() == digest()


@pytest.mark.parametrize(
    "other",
    [
        {"asked": ("without weights",)},
        {"asked": ("with weights", "memory")},
        {"machine": "7 x RTX"},
        {"environment": {"VLLM_USE_V2_MODEL_RUNNER": "1"}},
        {"environment": {"NCCL_P2P_DISABLE": "1"}},
        {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "x"}},
    ],
)
def test_what_decides_changes_it(digest, other):
    assert digest() != digest(**other)


def test_a_terminal_s_width_decides_nothing(digest):
    assert digest() == digest(environment={"COLUMNS": "80", "HOSTNAME": "abc"})


def test_arguments(digest):
    assert digest() != digest("--max-num-seqs", "64")


def test_the_configuration_file_s_content(digest, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("max-num-seqs: 64\n")
    before = digest("--config", str(file))
    file.write_text("max-num-seqs: 32\n")
    assert digest("--config", str(file)) != before


def test_a_file_that_an_argument_names(digest, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    before = digest("--chat-template", str(template))
    template.write_text("{% broken")
    assert digest("--chat-template", str(template)) != before


def test_the_directory_of_another_tokenizer(digest, tmp_path):
    before = digest("--tokenizer", str(tmp_path))
    (tmp_path / "tiktoken.model").write_text("AA== 0")
    assert digest("--tokenizer", str(tmp_path)) != before


def test_arguments_in_no_form_that_json_has(digest, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("served-model-name: [2026-11-30]\n")
    assert digest("--config", str(file)) == digest("--config", str(file))


def test_the_models_files(digest, kimi, mla_drafter):
    before = digest()
    kimi.change(rms_norm_eps=2e-5)
    changed = digest()
    assert changed != before
    (mla_drafter.directory / "model.safetensors").write_bytes(b"x")
    assert digest() != changed


def test_the_file(tmp_path):
    remembered = Remembered(tmp_path)
    assert remembered.passed_at("full", "a") is None
    remembered.keep("full", "a")
    assert Remembered(tmp_path).passed_at("full", "a")
    assert Remembered(tmp_path).passed_at("full", "b") is None


KINDS = ("static", "beside", "full")  # each proves more than the one before


@pytest.mark.parametrize("kept", KINDS)
@pytest.mark.parametrize("asked", KINDS)
def test_what_proves_more_is_enough(tmp_path, kept, asked):
    remembered = Remembered(tmp_path)
    remembered.keep(kept, "a")
    assert bool(remembered.passed_at(asked, "a")) == (KINDS.index(kept) >= KINDS.index(asked))


def test_old_ones_are_forgotten(tmp_path):
    remembered = Remembered(tmp_path)
    (tmp_path / "rehearsals.json").write_text(
        "{" + ", ".join(f'"full {number}": "2026-01-{number + 1:02}T00:00:00+00:00"' for number in range(25)) + "}"
    )
    remembered.keep("full", "new")
    assert remembered.passed_at("full", "new")
    assert remembered.passed_at("full", "24")
    assert remembered.passed_at("full", "0") is None


def test_a_broken_file_forgets(tmp_path):
    (tmp_path / "rehearsals.json").write_text('["a"')
    assert Remembered(tmp_path).passed_at("full", "a") is None
