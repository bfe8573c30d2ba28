"""`aerie diagnose` on logs from anywhere: what it prints, and how it ends."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import aerie
from aerie.cli import main
from aerie.diagnosis import starts as reading
from aerie.diagnosis.command import KNOWN, NO_FAILURE, UNKNOWN, USAGE
from aerie.diagnosis.signatures import signatures

BEGIN = "(APIServer pid=1) INFO 11-29 13:00:00 [api_utils.py:286] non-default args: {'model': 'm'}\n"
LIFE = "INFO:     Application startup complete.\n"
STOP = "(APIServer pid=1) INFO 11-29 13:09:00 [launcher.py:254] [shutdown] API server: shutdown triggered\n"
QUIET = "(APIServer pid=1) INFO 11-29 13:00:01 [loggers.py:302] Engine 000: Avg prompt throughput: 1.0 tokens/s\n"


def crash(cause):
    return f"""\
Traceback (most recent call last):
  File "/v/bin/vllm", line 8, in <module>
    sys.exit(main())
  File "/v/site-packages/vllm/entrypoints/cli/main.py", line 120, in main
    args.dispatch_function(args)
{cause}
"""


PORT = "OSError: [Errno 98] Address already in use"


@pytest.fixture
def diagnose(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(log, *options):
        path = Path("the vllm.log")
        path.write_bytes(log if isinstance(log, bytes) else log.encode())
        code = main(["diagnose", str(path), *options])
        return code, capsys.readouterr()

    return run


def test_a_known_cause_is_printed_with_its_remedy(diagnose):
    code, said = diagnose(BEGIN + crash(PORT))
    assert code == KNOWN
    assert PORT in said.out
    assert "docs/troubleshooting.md#port-taken" in said.out
    assert not said.err


def test_an_unknown_cause_is_printed_with_file_and_line(diagnose):
    code, said = diagnose(BEGIN + crash("LookupError: never heard of"))
    assert code == UNKNOWN
    assert "vllm/entrypoints/cli/main.py:120 in main" in said.out
    assert "not known" in said.out


def test_a_log_without_a_failure_says_so(diagnose):
    code, said = diagnose(BEGIN + LIFE)
    assert code == NO_FAILURE
    assert said.out.startswith("No failure in ")
    assert "is not finished" not in said.out


def test_a_log_that_ends_in_a_start_may_be_that_of_a_killed_one(diagnose):
    code, said = diagnose(BEGIN)
    assert code == NO_FAILURE
    assert said.out.startswith("The start in ")
    assert "is not finished" in said.out
    assert "No failure" not in said.out
    assert "No failure" in diagnose(BEGIN + STOP)[1].out
    assert "No failure" in diagnose(BEGIN + "aerie: stopping\n")[1].out


KERNEL = "Nov 29 13:34:57 host1 kernel: NVRM: Xid (PCI:0000:41:00): 79, pid=7, GPU has fallen off the bus.\n"


@pytest.mark.parametrize(
    ("log", "hint"),
    [
        ("", "whole output"),
        ("2026/11/29 13:35:00 [emerg] bind() to 0.0.0.0:80 failed (98: Address already in use)\n", "whole output"),
        ('Traceback (most recent call last):\n  File "/srv/x.py", line 5, in <module>\n' + PORT, PORT),
        (KERNEL, "the GPU fell off the bus"),
    ],
)
def test_a_log_without_a_line_of_vllms_gets_no_remedy_for_one(diagnose, log, hint):
    code, said = diagnose(log + "a line of another program\n")
    assert code == USAGE
    assert "nothing in it is vLLM's" in " ".join(said.err.split())
    assert hint in " ".join(said.err.split())
    assert not said.out


def test_a_crash_of_another_service_is_none_of_the_engines(diagnose):
    def carried(service, text):
        return "".join(f"{service}  | {line}\n" for line in text.splitlines())

    other = 'Traceback (most recent call last):\n  File "/srv/x.py", line 5, in <module>\n' + PORT
    assert diagnose(carried("webui-1", other) + carried("vllm-1", BEGIN + LIFE))[0] == NO_FAILURE
    assert diagnose(carried("vllm-1", BEGIN + LIFE) + carried("webui-1", other))[0] == NO_FAILURE


def test_the_log_of_a_container_has_its_supervisors_starts(diagnose):
    failed = "aerie: starting\naerie: failed; the start has stalled: nothing moved for 9 s while loading target\n"
    code, said = diagnose(failed + "aerie: starting\n" + BEGIN + crash(PORT))
    assert code == KNOWN
    assert "port-taken" in said.out
    assert "1 earlier start in this log failed too" in said.out
    held = "aerie: held; key file /k does not exist: put one there\n"
    assert diagnose(held)[0] == KNOWN
    assert diagnose(held + "aerie: starting\n" + BEGIN + LIFE)[1].out.startswith("The last start in this log has not")


def test_of_several_crashes_the_last_is_told_and_the_others_are_counted(diagnose):
    code, said = diagnose(BEGIN + crash("KeyError: 1") + BEGIN + crash("KeyError: 2") + BEGIN + crash(PORT))
    assert code == KNOWN
    assert "2 earlier starts in this log failed too" in said.out
    assert "KeyError" not in said.out
    assert said.out.count("  - The engine crashed, and the cause is not known\n") == 2


def test_of_very_many_crashes_the_latest_are_named(diagnose):
    said = diagnose((BEGIN + crash(PORT)) * 3 + (BEGIN + crash("KeyError: 1")) * 6)[1]
    assert "8 earlier starts in this log failed too, the latest:\n  - The engine crashed" in said.out
    assert "  - A port is taken" not in said.out


def test_a_usage_error_after_a_crash_is_the_last_start(diagnose):
    usage = "usage: vllm serve [model_tag] [options]\nvllm serve: error: argument --port: invalid int value: 'x'\n"
    said = diagnose(BEGIN + crash("KeyError: 1") + usage)[1].out
    assert "invalid int value" in said
    assert "1 earlier start in this log failed too" in said


def test_a_log_that_begins_in_a_start_has_that_start(diagnose):
    said = diagnose(crash("KeyError: 1") + BEGIN + crash(PORT))[1].out
    assert "1 earlier start in this log failed too" in said


def test_a_failure_that_a_good_start_followed_is_told_as_such(diagnose):
    code, said = diagnose(BEGIN + crash(PORT) + BEGIN + LIFE)
    assert code == KNOWN
    assert said.out.startswith("The last start in this log has not failed")
    assert "The one before it did" in said.out
    assert "failed too" not in said.out
    assert "1 earlier start in this log failed too" in diagnose(2 * (BEGIN + crash(PORT)) + BEGIN + LIFE)[1].out


def test_a_crash_after_a_start_that_was_stopped_is_told(diagnose):
    assert diagnose(BEGIN + LIFE + STOP + BEGIN + crash(PORT))[0] == KNOWN


def test_json_has_the_same(diagnose):
    code, said = diagnose(BEGIN + crash("KeyError: 1") + BEGIN + crash(PORT), "--json")
    told = json.loads(said.out)
    assert code == KNOWN
    assert (told["other_failures"], told["of_the_last_start"]) == (1, True)
    assert told["diagnosis"]["signature"] == "port-taken"
    assert told["diagnosis"]["root"]["file"] == "vllm/entrypoints/cli/main.py"
    assert json.loads(diagnose(BEGIN + LIFE, "--json")[1].out)["diagnosis"] is None


@pytest.mark.parametrize(
    "carried",
    [
        "vllm-1  | {}",
        "Nov 29 13:00:00 host1 aerie[12]: {}",
        "[pod/vllm-0/vllm] 2026-11-29T13:00:00.123456789Z {}",
        "2026-11-29T13:00:00.123456789Z stdout F {}",
        "\x1b[32m{}\x1b[0m",
    ],
)
def test_whoever_carried_the_log(diagnose, carried):
    log = "".join(carried.format(line) + "\n" for line in (BEGIN + crash(PORT)).splitlines())
    assert diagnose(log)[0] == KNOWN


@pytest.mark.parametrize(
    ("log", "problem"),
    [
        (b"", "is empty"),
        (b"\x7fELF\0\0\0", "is no text"),
        (b"\x1f\x8b\x08", "is compressed; again with: zcat 'the vllm.log' | aerie diagnose -"),
        ("x\n".encode("utf-16"), "is UTF-16; again with: iconv "),
        (b'{"__REALTIME_TIMESTAMP":"1","MESSAGE":"x"}\n', "jq -r .MESSAGE "),
        (b'{"ts":1,"msg":"x"}\n', "each line in JSON; again with: jq -r .FIELD "),
        (b'timestamp,line\n2026-11-29,"x"\n', "is CSV"),
        (b'{"log":"Traceback (most recent call last):\\n","stream":"stderr","time":"2026"}\n', "jq -rj .log "),
    ],
)
def test_what_is_no_log_is_refused(diagnose, log, problem):
    code, said = diagnose(log)
    assert code == USAGE
    assert problem in said.err.replace(":\n  ", ": ")
    assert max(map(len, said.err.splitlines())) <= 100
    assert "..." not in said.err, "a command is whole, to be copied"
    assert not said.out


def test_a_missing_file_and_a_directory_are_refused(tmp_path, capsys):
    assert main(["diagnose", str(tmp_path / "none.log")]) == USAGE
    assert "there is no such file" in " ".join(capsys.readouterr().err.split())
    assert main(["diagnose", str(tmp_path)]) == USAGE
    said = capsys.readouterr().err
    assert "it is a directory" in " ".join(said.split())
    assert f"\n  cat {tmp_path}/*.log | aerie diagnose -\n" in said


def test_standard_input_is_read(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((BEGIN + crash(PORT)).encode())))
    assert main(["diagnose", "-"]) == KNOWN
    assert PORT in capsys.readouterr().out


def test_a_closed_standard_input_is_refused_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it after `<&-`
    assert main(["diagnose", "-"]) == USAGE
    assert capsys.readouterr().err == "aerie: standard input is closed: pipe the log into it, or name a file\n"


CORE_STOPPED = (
    "(EngineCore pid=7) INFO 11-29 13:09:00 [core.py:1454] [shutdown] EngineCore: trigger received signal=SIGTERM\n"
)


@pytest.mark.parametrize(
    ("log", "told"),
    [
        (BEGIN + STOP, "stopped from outside (SIGTERM) before it was ready."),
        (BEGIN + "aerie: stopping\n", "stopped from outside (SIGTERM) before it was ready."),
        (BEGIN + "vllm-1 exited with code 143\n", "stopped from outside (SIGTERM) before it was ready."),
        (BEGIN + CORE_STOPPED, "stopped from outside (SIGTERM) before it was ready, or its API server was killed"),
        (BEGIN + LIFE + STOP, "stopped from outside (SIGTERM) before it served anything."),
    ],
)
def test_a_start_that_somebody_stopped_says_so(diagnose, log, told):
    code, said = diagnose(log)
    assert code == NO_FAILURE
    assert told in " ".join(said.out.split())
    assert told in json.loads(diagnose(log, "--json")[1].out)["no_failure"]


@pytest.mark.parametrize("log", [BEGIN + LIFE, BEGIN + LIFE + QUIET + STOP, LIFE + QUIET + STOP + CORE_STOPPED, STOP])
def test_an_engine_that_served_and_was_stopped_has_no_failure(diagnose, log):
    code, said = diagnose(log)
    assert code == NO_FAILURE
    assert said.out == "No failure in the vllm.log.\n"


def test_a_log_that_ends_inside_a_traceback_says_where(diagnose):
    head = "(Worker_TP1 pid=9) ERROR 11-29 13:00:09 [multiproc_executor.py:953] "
    lines = crash(PORT).splitlines()[:-1]
    for log in (BEGIN, BEGIN + LIFE + QUIET):
        code, said = diagnose(log + "".join(f"{head}{line}\n" for line in lines))
        assert code == NO_FAILURE
        told = " ".join(said.out.split())
        assert "ends inside a traceback of Worker_TP1 (pid 9), at vllm/entrypoints/cli/main.py:120 in main." in told
        assert "give the rest of the log" in told
        assert "killed" not in told
        assert "No failure" not in told
    unnamed = diagnose(BEGIN + lines[0] + "\n")[1].out
    assert unnamed.startswith("the vllm.log ends inside a traceback. What was raised")
    assert "No failure" in diagnose(BEGIN + LIFE + "\n".join(lines) + "\n" + QUIET * 20)[1].out, "it was not the end"


def test_a_reader_that_leaves_early_is_no_crash(tmp_path):
    log = tmp_path / "vllm.log"
    log.write_text(BEGIN + crash(PORT))
    read_end, write_end = os.pipe()
    os.close(read_end)
    ended = subprocess.run(
        [sys.executable, "-c", "from aerie.cli import main; raise SystemExit(main())", "diagnose", str(log)],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(aerie.__file__).parents[1])},
    )
    os.close(write_end)
    assert (ended.returncode, ended.stderr) == (KNOWN, "")


def test_harmless_lines_that_were_seen_are_named(diagnose):
    harmless = next(known for known in signatures() if known.severity == "harmless")
    _, said = diagnose(BEGIN + harmless.excerpt + LIFE)
    assert f"Seen, and harmless: {harmless.id}" in said.out


def large(*parts):
    """Much more than is read line by line, with `parts` in its middle and no end that tells."""
    quiet = QUIET * (reading._BLOCK // len(QUIET) + 1)
    return "".join([quiet * 5, *(part + quiet * 5 for part in parts), quiet * (reading._LAST_BLOCKS + 5)])


@pytest.fixture
def nothing_whole(monkeypatch):
    monkeypatch.setattr(reading, "_WHOLE", 0)


def test_a_crash_in_the_middle_of_a_large_log_is_found(diagnose, nothing_whole):
    code, said = diagnose(large(BEGIN + crash("KeyError: 1"), BEGIN + crash(PORT)))
    assert code == KNOWN
    assert "1 earlier start in this log failed too" in said.out


IDLE = "(EngineCore pid=7) INFO 11-29 13:00:01 [core.py:1] still here\n" * (reading._BLOCK // 60)


def test_of_a_log_that_is_not_large_every_line_is_read(diagnose):
    assert diagnose(PORT + "\n" + IDLE * (reading._LAST_BLOCKS + 5))[0] == KNOWN


def test_the_end_of_a_large_log_is_read_line_by_line(diagnose, nothing_whole):
    assert diagnose(IDLE * 5 + PORT + "\n" + IDLE * 2)[0] == KNOWN
    assert diagnose(PORT + "\n" + IDLE * (reading._LAST_BLOCKS + 5))[0] == NO_FAILURE  # nothing marks it as telling


def test_the_header_above_a_block_is_read_with_it(diagnose, nothing_whole):
    header = "--- Logging error ---\n"  # ends just before a block does, so that the traceback stands in the next one
    printed = 'Traceback (most recent call last):\n  File "/vllm/a.py", line 1, in emit\nValueError: y\n'
    quiet = (QUIET * (reading._BLOCK // len(QUIET)))[: reading._BLOCK - len(header) - 10]
    assert diagnose(quiet[:-1] + "\n" + header + printed)[0] == NO_FAILURE


def test_a_traceback_that_goes_on_in_the_next_block_is_read(diagnose, nothing_whole):
    head, tail = crash(PORT).split("\n", 1)
    quiet = (IDLE * 2)[: reading._BLOCK - len(head) - 10]
    log = quiet[: quiet.rindex("\n")] + "\n" + head + "\n" + tail + IDLE * (reading._LAST_BLOCKS + 5)
    assert diagnose(log)[0] == KNOWN


def test_what_a_living_engine_caught_is_no_failure_of_a_large_log(diagnose, nothing_whole):
    printed = 'Traceback (most recent call last):\n  File "/vllm/a.py", line 1, in probe\nOSError: no such device\n'
    end = IDLE * (reading._LAST_BLOCKS + 5)
    assert diagnose(IDLE * 5 + printed + IDLE * 5 + QUIET + end)[0] == NO_FAILURE
    assert diagnose(IDLE * 5 + printed + IDLE * 5 + end)[0] == UNKNOWN


def test_of_a_large_quiet_log_little_is_read_line_by_line(diagnose, nothing_whole, monkeypatch):
    fed = []
    feed = reading.LineReader.feed
    monkeypatch.setattr(reading.LineReader, "feed", lambda self, data: fed.append(len(data)) or feed(self, data))
    log = large(crash(PORT)) + large()
    diagnose(log)
    assert sum(fed) < len(log) / 2
