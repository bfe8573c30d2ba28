"""The commands' surface: help, versions, usage errors."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import aerie
from aerie import cli

COMMANDS = ["serve", "retry", "wait", "probe", "status", "ask", "diagnose", "fabric", "model", "patches"]
MODEL = ["fetch", "adopt", "verify", "list", "rollback", "prune", "warm", "tiny"]


@pytest.mark.parametrize(
    "command", [[], *([command] for command in COMMANDS), *(["model", each] for each in MODEL), ["fabric", "numa"]]
)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: aerie" in shown
    if not command:
        assert all(re.search(rf"^    {name} ", shown, re.MULTILINE) for name in COMMANDS)


@pytest.mark.parametrize(
    "name", [*(name for name in COMMANDS if name != "model"), *(f"model {each}" for each in MODEL), "fabric numa"]
)
def test_every_command_says_what_it_does_what_it_takes_and_how_it_ends(name):
    command = cli._parser()
    for word in name.split():
        choices = next(action for action in command._actions if isinstance(action, argparse._SubParsersAction))
        command = choices.choices[word]
    assert len(command.description) > 40
    assert re.match(r"Exit codes: 0 ", command.epilog)
    assert [action.dest for action in command._actions if not action.help] == []


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"aerie {aerie.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["sing"], "invalid choice: 'sing'"),
        (["wait", "http://127.0.0.1:99999"], "'http://127.0.0.1:99999' is no URL such as http://127.0.0.1:8001"),
        (["status", "http://a..b:80"], "'http://a..b:80' is no URL such as http://127.0.0.1:8001"),
        (["probe", "http://[::1"], "'http://[::1' is no URL such as http://127.0.0.1:8001"),
        (["wait", "localhost:8001"], "'localhost:8001' is no URL such as http://127.0.0.1:8001"),
        (
            ["wait", "http://x", "--", "--port", "1"],
            "only `aerie serve` and `aerie rehearse` take arguments after `--`",
        ),
        (["serve", "--port", "8000"], "unrecognized arguments: --port 8000"),
        (["model", "tiny"], "--out"),
        (
            ["model", "verify", "--source", "nowhere"],
            "'nowhere': it names no place; a source is one of\n  hf:OWNER/NAME ",
        ),
        (["model", "rollback", "Kimi@abc"], "'Kimi@abc' has a revision, which is an argument of its own: Kimi abc"),
        (["model", "fetch", "o/n", "--connections", "257"], "'257' is more than 256"),
    ],
)
def test_a_usage_error_exits_2_and_names_what_was_given(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "usage", "message"),
    [
        (
            ["model", "fetch", "o/n", "--modelsdir", "m"],
            "aerie model fetch [",
            "--modelsdir m; did you mean --models-dir?",
        ),
        (["model", "fetch", "o/n", "--models", "m"], "aerie model fetch [", "--models m; did you mean --models-dir?"),
        (["model", "fetch", "o/n", "--dry"], "aerie model fetch [", "--dry; did you mean --dry-run?"),
        (["model", "prune", "--dryrun=1"], "aerie model prune [", "--dryrun=1; did you mean --dry-run?"),
        (["model", "list", "Kimi"], "aerie model list [", "unrecognized arguments: Kimi\n"),
        (["fabric", "numa", "--jso"], "aerie fabric numa [", "--jso; did you mean --json?"),
        (["serve", "--onc"], "aerie serve [options]", "--onc; what is vLLM's goes after `--`; did you mean --once?"),
        (["serve", "--port", "1"], "aerie serve [options]", "--port 1; what is vLLM's goes after `--`\n"),
        (["--versio", "status"], "aerie [-h]", "did you mean --version?"),
    ],
)
def test_an_option_that_there_is_none_of_is_told_by_the_command_itself(arguments, usage, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"usage: {usage}")
    assert message in told


@pytest.mark.parametrize(
    "arguments",
    [
        ["fetch", ""],
        ["fetch", "o/n", "--name", ""],
        ["fetch", "o/n", "--models-dir", ""],
        ["fetch", "o/n", "--revision", " "],
        ["fetch", "o/n", "--endpoint="],
        ["fetch", "o/n", "--token-file", ""],
        ["fetch", "o/n", "--include", ""],
        ["adopt", ""],
        ["adopt", "d", "--name", ""],
        ["verify", ""],
        ["verify", "--source", ""],
        ["list", "--models-dir="],
        ["rollback", ""],
        ["rollback", "m", ""],
        ["prune", ""],
        ["warm", ""],
        ["loader", "--config", ""],
        ["tiny", "--out", ""],
    ],
)
def test_an_empty_text_is_no_choice(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["model", *arguments])
    assert ended.value.code == 2
    assert "an empty text was given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["fetch", "{}/m/none", "--models-dir", "{}"], 1),
        (["fetch", "nowhere", "--models-dir", "{}"], 2),
        (["adopt", "{}/m/none", "--models-dir", "{}"], 1),
        (["adopt", "{}/m", "--source", "nowhere", "--models-dir", "{}"], 2),
        (["verify", "Kimi", "--models-dir", "{}"], 1),
        (["verify", "../Kimi", "--models-dir", "{}"], 2),
        (["list", "--models-dir", "{}/nowhere"], 1),
        (["rollback", "Kimi", "--models-dir", "{}"], 1),
        (["prune", "Kimi", "--models-dir", "{}/nowhere"], 1),
        (["warm", "{}/nowhere"], 1),
        (["warm", "{}"], 1),
        (["loader", "--config", "{}/nowhere"], 1),
    ],
)
def test_what_fails_says_so_as_json_too(arguments, code, tmp_path, capsys):
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text("{}")
    assert cli.main(["model", *(each.format(tmp_path) for each in arguments), "--json"]) == code
    told = capsys.readouterr()
    result = json.loads(told.out)
    assert (list(result), result["state"]) == (["state", "message"], "failed")
    assert told.err == f"aerie model {arguments[0]}: {result['message']}\n"


def test_what_follows_the_dashes_is_vllms(monkeypatch):
    given = []
    monkeypatch.setattr(cli, "_serve", lambda options: given.append(options.engine_arguments) or 0)
    assert cli.main(["serve", "--once", "--", "m", "--help", "--once", "--", "x"]) == 0
    assert given == [["m", "--help", "--once", "--", "x"]]


def test_it_runs_as_a_module_too():
    done = subprocess.run(
        [sys.executable, "-m", "aerie.cli", "--version"], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(Path(aerie.__file__).parents[1])},
    )  # fmt: skip
    assert done.stdout == f"aerie {aerie.__version__}\n"
