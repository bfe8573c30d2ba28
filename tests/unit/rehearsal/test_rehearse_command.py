"""`aerie rehearse` as far as it goes without an engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sparse_checkpoint import published_shard, write_sparse

from aerie.checkpoint.config import read_drafter, read_target
from aerie.checkpoint.layout import drafter_layout, target_layout
from aerie.cli import main

CONFIG = Path(__file__).parents[3] / "config/kimi-k2.5.yaml"
# Without an image around it, no patches are recorded and no tokenizer is there.
UNPROVEN_HERE = ("--accept", "patches", "--accept", "tokenizer", "--accept", "chat template")


@pytest.fixture
def rehearse(tmp_path, capsys):
    def run(*words, engine=()):
        (tmp_path / "cache").mkdir(exist_ok=True)
        code = main(
            ["rehearse", "--cache-dir", str(tmp_path / "cache"), "--json", "-", *map(str, words), "--", *engine]
        )
        said = capsys.readouterr()
        return code, json.loads(said.out) if said.out else None, said.err

    return run


@pytest.fixture
def pair(kimi, mla_drafter):
    return ("--target", kimi.directory, "--drafter", mla_drafter.directory, "--config", CONFIG)


OF_ENGINE = "whether vLLM knows each option and value, and all else that an engine shows"
PLAN = ("--static", "--without-weights", "--chip", "sm_120")


def verdicts(report):
    return {each["check"]: each["verdict"] for each in report["findings"]}


def test_the_published_pair_passes(rehearse, pair):
    code, report, said = rehearse(*pair, *PLAN, *UNPROVEN_HERE)
    assert [each for each in report["findings"] if each["verdict"] == "failed"] == []
    assert (code, report["verdict"], report["kind"], report["profile"]) == (0, "passed", "static", None)
    assert report["not_proven"] == [f"{OF_ENGINE}: only the static checks were asked for"]
    assert verdicts(report)["target files"] == "skipped"
    assert "Static checks" in said
    assert "The rehearsal passed after" in said


def test_all_of_its_595_gb(rehearse, pair, kimi, mla_drafter):
    write_sparse(kimi.directory, target_layout(read_target(kimi.directory)), published_shard)
    write_sparse(mla_drafter.directory, drafter_layout(read_drafter(mla_drafter.directory), None))
    _, report, _ = rehearse(*pair, "--static", "--chip", "sm_120", *UNPROVEN_HERE)
    assert verdicts(report)["target files"] == "passed"
    assert verdicts(report)["drafter files"] == "passed"


def test_a_failed_check_fails_it_and_starts_no_engine(rehearse, pair, mla_drafter):
    mla_drafter.change(eagle_aux_hidden_state_layer_ids=[2, 30, 70])
    code, report, said = rehearse(*pair, "--without-weights", "--chip", "sm_120", *UNPROVEN_HERE)
    assert code == 1
    assert verdicts(report)["auxiliary layers"] == "failed"
    assert report["not_proven"] == [f"{OF_ENGINE}: static checks failed, so none was started"]
    assert "FAIL auxiliary layers" in said
    assert "The rehearsal FAILED after" in said


def test_accepted(rehearse, pair, mla_drafter):
    mla_drafter.change(eagle_aux_hidden_state_layer_ids=[2, 30, 70])
    code, report, _ = rehearse(*pair, *PLAN, *UNPROVEN_HERE, "--accept", "auxiliary layers")
    assert code == 0
    (found,) = [each for each in report["findings"] if each["check"] == "auxiliary layers"]
    assert found["verdict"] == "warned"
    assert found["text"].endswith("(accepted with --accept)")


def test_what_cannot_be_read_cannot_be_accepted(rehearse, pair, kimi, tmp_path):
    (kimi.directory / "config.json").write_text("{")
    assert rehearse(*pair, *PLAN, *UNPROVEN_HERE, "--accept", "target config")[0] == 1
    (tmp_path / "serve.yaml").write_text("max-num-seqs: [")
    assert rehearse("--config", tmp_path / "serve.yaml", "--static", "--accept", "arguments")[0] == 1


def test_a_name_that_no_check_has(rehearse, pair):
    code, report, _ = rehearse(*pair, *PLAN, *UNPROVEN_HERE, "--accept", "no such check")
    assert code == 0
    (found,) = [each for each in report["findings"] if each["check"] == "--accept"]
    assert (found["verdict"], found["text"]) == ("warned", "no check of this rehearsal is called 'no such check'")


def test_a_target_that_is_not_there(rehearse, mla_drafter):
    code, report, _ = rehearse("--target", "/data/nowhere", "--drafter", mla_drafter.directory, "--static")
    assert code == 1
    (found,) = report["findings"]
    assert found["check"] == "target config"
    assert found["remedy"].startswith("give another directory: --target")
    assert found["text"] == "/data/nowhere/config.json does not exist: give the directory of a checkpoint"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("max-num-seqs: [", "is not YAML"),
        ("- a\n", "must hold `option: value` lines"),
        ("max-num-seqs:\n", "max-num-seqs has no value"),
        ("model: x\ndisable-log-stats: true\n", "--disable-log-stats is refused"),
        ("model: x\nmax-num-seqs: many\n", "--max-num-seqs 'many' is no whole number"),
        ("model: x\nspeculative-config: eagle3\n", "--speculative-config 'eagle3' is not a mapping"),
    ],
)
def test_a_configuration_that_cannot_be(rehearse, tmp_path, content, text):
    (tmp_path / "serve.yaml").write_text(content)
    code, report, _ = rehearse("--config", tmp_path / "serve.yaml", "--static")
    assert code == 1
    (found,) = report["findings"]
    assert found["check"] == "arguments"
    assert text in found["text"]


def test_two_paths_that_lead_nowhere_are_told_together(rehearse):
    _, report, _ = rehearse("--target", "/data/nowhere", "--drafter", "/data/either", "--static")
    assert [each["check"] for each in report["findings"]] == ["target config", "drafter config"]


def test_what_it_was_planned_for(rehearse, pair):
    _, report, said = rehearse(*pair, *PLAN, *UNPROVEN_HERE)
    assert report["hardware"]["chip"] == "sm_120"
    assert report["arguments"][:2] == ["--config", str(CONFIG)]
    first = said.splitlines()[0]
    assert first.startswith(
        "moonshotai--Kimi-K2.5 with lightseekorg--kimi-k2.5-eagle3-mla, planned for 8 x RTX PRO 6000"
    )


def test_without_a_model(rehearse, tmp_path):
    (tmp_path / "serve.yaml").write_text("port: 8000\n")
    code, report, _ = rehearse("--config", tmp_path / "serve.yaml", "--static")
    assert code == 1
    assert report["findings"][0]["text"].startswith("no model was given")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "give --target DIR, or --config FILE"),
        (("--target", "x", "--static", "--beside"), "give one of them"),
        (("--target", "x", "--gpus", "4"), "give --chip, too"),
        (("--target", "x", "--chip", "sm_10"), "--chip sm_10"),
        (
            ("--target", "x", "--junit", "/proc/nowhere/all.xml"),
            "--junit /proc/nowhere/all.xml cannot be written: No such file or directory",
        ),
        (("--target", "x", "--junit", "-"), "--json and --junit both name -"),
        (("--target", "x", "--junit", "/proc"), "--junit /proc cannot be written: Is a directory"),
        (("--target", "x", "--work-dir", "/proc/x"), "--work-dir /proc/x cannot be used"),
        (("--target", "x", "--work-dir", "."), "is not empty"),
    ],
)
def test_wrong_usage(rehearse, words, text):
    code, report, said = rehearse(*words)
    assert (code, report) == (2, None)
    assert text in said


def test_other_commands_take_no_arguments_of_the_engine(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["status", "--", "--port", "8000"])
    assert ended.value.code == 2
    assert "only `aerie serve` and `aerie rehearse` take arguments after `--`" in capsys.readouterr().err


def test_nobody_reads_on(pair, tmp_path):
    words = ["rehearse", *map(str, pair), *PLAN, *UNPROVEN_HERE, "--cache-dir", str(tmp_path)]
    program = (
        f"import sys; from aerie.cli import main; sys.exit(main({[*words, '--json', str(tmp_path / 'r.json')]!r}))"
    )
    read, written = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        stdout=written,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": "src"},
    )
    os.close(written)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads((tmp_path / "r.json").read_text())["verdict"] == "passed"


def test_files(rehearse, pair, tmp_path):
    assert main(
        [
            *("rehearse", *map(str, pair), *PLAN, *UNPROVEN_HERE, "--cache-dir", str(tmp_path)),
            *("--json", str(tmp_path / "report.json"), "--junit", str(tmp_path / "report.xml")),
        ]
    ) == 0  # fmt: skip
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "passed"
    assert "<testsuite " in (tmp_path / "report.xml").read_text()


def test_what_passed_is_not_done_again(rehearse, pair):
    words = (*pair, *PLAN, *UNPROVEN_HERE, "--if-changed")
    assert rehearse(*words)[1]["ran"] is True
    code, report, said = rehearse(*words)
    assert (code, report["ran"], report["verdict"], report["findings"]) == (0, False, "passed", [])
    assert "Nothing has changed since the rehearsal that passed at" in said
    assert rehearse(*words, engine=["--max-num-seqs", "64"])[1]["ran"] is True
    assert rehearse(*pair, *PLAN, *UNPROVEN_HERE)[1]["ran"] is True


def test_with_a_file_that_cannot_be_read_nothing_is_known_to_be_as_it_was(rehearse, pair, kimi, monkeypatch):
    (kimi.directory / "notes.txt").touch()
    read = Path.read_bytes

    def refuse(path):
        if path.name == "notes.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    words = (*pair, *PLAN, *UNPROVEN_HERE, "--if-changed")
    assert [rehearse(*words)[1]["ran"] for _ in range(2)] == [True, True]


def test_what_failed_is_done_again(rehearse, pair, mla_drafter):
    mla_drafter.change(eagle_aux_hidden_state_layer_ids=[2, 30, 70])
    words = (*pair, *PLAN, *UNPROVEN_HERE, "--if-changed")
    assert rehearse(*words)[0] == 1
    assert rehearse(*words)[0] == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(pair, tmp_path, number, code):
    """While it compiles: a shell stands in for the compiler's child process, and waits."""
    stand_in = tmp_path / "python"
    stand_in.write_text("#!/bin/sh\nexec sleep 60\n")
    stand_in.chmod(0o755)
    words = ["rehearse", *map(str, pair), "--without-weights", "--chip", "sm_120", *UNPROVEN_HERE]
    program = (
        f"import sys; from aerie.cli import main; sys.executable = {str(stand_in)!r}; "
        f"sys.exit(main({[*words, '--cache-dir', str(tmp_path), '--json', str(tmp_path / 'report.json')]!r}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": "src"}
    )
    assert process.stdout is not None
    said = iter(process.stdout.readline, "")
    assert any("Kernels" in line for line in said)
    time.sleep(0.2)
    process.send_signal(number)
    rest, _ = process.communicate(timeout=20)
    assert process.returncode == code
    assert "The rehearsal was interrupted after" in rest
    assert "Traceback" not in rest
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "interrupted"
