"""What an operator reads last, and what everybody else gets of it."""

# ruff: noqa: E501 - a log's lines are as long as they are

import re

import pytest

from aerie.diagnosis import Collector, Evidence, Kind, Severity, parse_kernel
from aerie.diagnosis.signatures import Signature, Where
from aerie.startup.lines import parse

PORT = """\
(APIServer pid=12) INFO 11-29 13:00:00 [api_utils.py:286] non-default args: {}
Traceback (most recent call last):
  File "/v/bin/vllm", line 8, in <module>
    sys.exit(main())
  File "/v/lib/python3.11/site-packages/vllm/entrypoints/launchers/launcher.py", line 348, in create_server_socket
    sock.bind(addr)
  File "/v/lib/python3.11/site-packages/vllm/entrypoints/launchers/api_server/entry.py", line 177, in run_server
    x
OSError: [Errno 98] Address already in use
"""
GONE = "(EngineCore pid=7) ERROR 11-29 13:35:01 [multiproc_executor.py:315] Worker proc VllmWorker-3 died unexpectedly (exit code: -9), shutting down executor.\n"


def diagnosed(log, ended="vllm serve ended with exit code 1", evidence=(), known=None):
    collector = Collector(known)
    collector.feed(parse(log))
    return collector.diagnose(ended, evidence)


KNOWN = Signature(
    id="port-taken",
    title="The port is taken",
    match=re.compile("Address already in use"),
    where=Where.CAUSE,
    kind=Kind.CONFIGURATION,
    severity=Severity.FATAL,
    cause="Another process listens there. " * 4,
    remedy="See who has it: `ss -ltnp`.",
    source="vllm/entrypoints/launcher.py (0.32.0)",
    excerpt=PORT,
)


def test_a_known_failure_is_told_from_its_root_cause_to_its_remedy():
    rule = "-" * 100
    said = f"""\
{rule}
DIAGNOSIS: The port is taken (configuration)
{rule}

Root cause
  in APIServer (pid 12) at vllm/entrypoints/launchers/api_server/entry.py:177 in run_server
  > OSError: [Errno 98] Address already in use

Why
  Another process listens there. Another process listens there. Another process listens there.
  Another process listens there.

What to do
  See who has it: `ss -ltnp`.

See
  docs/troubleshooting.md#port-taken
  vllm/entrypoints/launcher.py (0.32.0)
{rule}"""
    assert diagnosed(PORT, known=[KNOWN]).text() == said


def test_an_unknown_one_says_that_it_is_not_known_and_shows_where():
    text = diagnosed(PORT.replace("Address already in use", "Never heard of")).text()
    assert "the cause is not known (crash)" in text
    assert "launchers/api_server/entry.py:177 in run_server" in text
    assert "\nSee\n" not in text


def test_how_it_ended_is_told_where_nothing_else_is():
    text = diagnosed("", ended="vllm serve ended with exit code 3").text()
    assert "It is known that vllm serve ended with exit code 3." in " ".join(text.split())
    assert "Root cause" not in text


def test_what_was_seen_outside_is_listed_and_the_rest_is_counted():
    kernel = "\n".join(f"NVRM: Xid (PCI:0000:41:00): {number}, x" for number in range(100, 110))
    text = diagnosed(GONE, evidence=parse_kernel(kernel)).text()
    assert text.count("  - kernel: NVRM: Xid") == 6
    assert "  - and 4 more" in text


@pytest.mark.parametrize("word", ["x" * 3000, "word " * 3000, "\x1b[2J\x07", "\t\t", "日本語" * 200])
def test_whatever_a_log_holds_the_text_stays_plain_and_narrow(word):
    lines = diagnosed(f"{PORT.rstrip()} {word}\n", evidence=[Evidence("kernel", 1e9, word)]).text().split("\n")
    assert max(map(len, lines)) <= 100
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("message", ["".join(f"\nline {number}" for number in range(40)), " word" * 500])
def test_a_long_message_is_cut(message):
    quoted = [line for line in diagnosed(PORT.rstrip() + message + "\n").text().splitlines() if line.startswith("  > ")]
    assert 12 <= len(quoted) <= 13


def test_pydantics_own_noise_is_left_out_of_the_text_and_not_of_the_data():
    noise = " [type=value_error, input_value=ArgsKwargs((), {'a': ...}), input_type=ArgsKwargs]"
    found = diagnosed(PORT.replace("OSError: [Errno 98] Address already in use", f"ValidationError: no{noise}"))
    assert "input_value" not in found.text()
    assert "input_value" in found.root.text


def test_the_data_has_the_form_of_the_state():
    told = diagnosed(PORT).to_json()
    assert set(told) == {
        "signature",
        "known",
        "title",
        "cause",
        "remedy",
        "kind",
        "severity",
        "source",
        "root",
        "evidence",
    }
    assert set(told["root"]) == {"text", "process", "pid", "file", "line", "function", "innermost", "chain", "excerpt"}
    assert (told["kind"], told["severity"], told["known"]) == ("configuration", "fatal", True)
    assert told["root"]["chain"] == ["OSError: [Errno 98] Address already in use"]
    assert diagnosed("").to_json()["root"] is None


ECHO = "(APIServer pid=12) ERROR 11-29 13:35:01 [async_llm.py:700] AsyncLLM output_handler failed.\n"
RAISED = """\
(EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1010] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1010] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1010] ZeroDivisionError: new
"""


def test_a_process_that_was_seen_to_die_and_said_nothing_was_killed():
    collector = Collector()
    collector.feed(parse(ECHO))
    diagnosis = collector.diagnose("VLLM::EngineCore (pid 7) died", kind=Kind.KILLED)
    assert (diagnosis.kind, diagnosis.title) == (Kind.KILLED, "A process of the engine was killed from outside")
    assert "VLLM::EngineCore (pid 7) died" in diagnosis.text()
    assert diagnosed(ECHO).signature == "only-an-echo", "of a log alone nobody knows"


def test_the_exit_code_of_a_process_that_was_seen_to_die_says_more():
    for code, kind in ((-9, Kind.KILLED), (-11, Kind.CRASH)):
        collector = Collector()
        collector.feed(parse(GONE.replace("-9", str(code))))
        assert collector.diagnose("VLLM::Worker_TP3 (pid 7) died", kind=Kind.KILLED).kind is kind


def test_a_process_that_was_seen_to_die_and_said_why_was_not():
    collector = Collector()
    collector.feed(parse(RAISED))
    assert collector.diagnose("VLLM::EngineCore (pid 7) died", kind=Kind.KILLED).kind is Kind.CRASH


def test_a_worker_killed_for_memory_is_told_as_such_by_its_own_signature():
    oom = "2026-11-29T13:34:58,1+00:00 host1 kernel: Memory cgroup out of memory: Killed process 4242 (VLLM::Worker_TP) total-vm:1kB"
    found = diagnosed(GONE, evidence=parse_kernel(oom))
    assert (found.kind, found.known) == (Kind.MEMORY, True)
    assert found.root.text.startswith("Worker proc VllmWorker-3 died")


def test_a_gpu_that_fell_off_the_bus_is_told_as_such_by_its_own_signature():
    xid = "NVRM: Xid (PCI:0000:41:00): 79, pid=4242, name=VLLM::Worker_TP, GPU has fallen off the bus."
    found = diagnosed(GONE, evidence=parse_kernel(xid))
    assert (found.kind, found.known) == (Kind.HARDWARE, True)


def test_an_end_that_is_recognised_without_its_cause_is_not_known():
    told = diagnosed(ECHO)
    assert (told.signature, told.known) == ("only-an-echo", False)
    assert "docs/troubleshooting.md#only-an-echo" in told.text()


def test_of_a_gpu_that_is_full_the_text_has_what_matters():
    said = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 36.00 GiB. GPU 0 has a total capacity of 139.80 "
        "GiB of which 28.17 GiB is free. Including non-PyTorch memory, this process has 111.62 GiB memory in use. Of the "
        "allocated memory 110.88 GiB is allocated by PyTorch, and 4.76 MiB is reserved by PyTorch but unallocated. If "
        "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation.  See documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html)"
    )
    found = diagnosed(PORT.replace("OSError: [Errno 98] Address already in use", said))
    assert "111.62 GiB memory in use" in found.text()
    assert "Of the allocated" not in found.text()
    assert "Of the allocated" in found.root.text


def test_of_a_long_message_the_head_and_the_last_lines_are_shown():
    lines = [f"line {number} of the build" for number in range(20)]
    notes = "\n".join((*lines, "x.cu(7): error: no such type", "x.cu(9): note: here", "x.cu(9): error: expected ;"))
    said = diagnosed(PORT.replace("OSError: [Errno 98] Address already in use", "RuntimeError: build failed\n" + notes))
    text = said.text()
    assert "  > RuntimeError: build failed\n  > line 0 of the build\n" in text
    assert text.index("  > ...\n") < text.index("  > x.cu(7): error: no such type\n  > x.cu(9): error: expected ;\n")
    assert "note: here" not in text


def test_a_command_of_several_words_stands_in_one_line_to_be_copied():
    echo = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above).\n"
    assert "\n  `docker compose logs vllm | docker compose exec -T vllm aerie diagnose -`." in diagnosed(echo).text()
