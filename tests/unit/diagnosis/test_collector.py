"""What of a mixed log belongs to the engine's end: its own output, fatal lines that go with it, the kernel's."""

# ruff: noqa: E501 - a log's lines are as long as they are

import re

import pytest

from aerie.diagnosis import Collector, Evidence, Kind, Severity, parse_kernel
from aerie.diagnosis.signatures import Signature, Where
from aerie.startup.lines import parse

NVML = Signature(
    id="gpus-lost",
    title="The container has lost its GPUs",
    match=re.compile("Failed to initialize NVML"),
    where=Where.LINE,
    needle="NVML",
    kind=Kind.HARDWARE,
    severity=Severity.FATAL,
    cause="They were taken away.",
    remedy="Recreate it.",
    source="vllm/platforms/cuda.py (0.32.0)",
    excerpt="Failed to initialize NVML: Unknown Error",
)
LOST = "Failed to initialize NVML: Unknown Error\n"
UP = "(APIServer pid=1) INFO 11-29 13:35:00 [a.py:1] up\n"
RAISED = """\
(EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1010] EngineCore encountered a fatal error.
(EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1010] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1010]   File "/v/site-packages/vllm/a.py", line 5, in forward
(EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1010]     probe()
(EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1010] RuntimeError: never heard of
"""
GONE = "(EngineCore pid=7) ERROR 11-29 13:35:01 [multiproc_executor.py:315] Worker proc VllmWorker-3 died unexpectedly (exit code: None), shutting down executor.\n"
OTHERS = """\
Traceback (most recent call last):
  File "/usr/local/bin/backup.py", line 88, in <module>
    main()
PermissionError: [Errno 13] Permission denied: '/srv/backup/list'
"""
XID = "2026-11-29T13:34:57+0000 gpuhost01 kernel: NVRM: Xid (PCI:0000:41:00): 79, pid=6755, name=VLLM::Worker_TP3, GPU has fallen off the bus.\n"
KILLED = "Nov 29 13:34:57 gpuhost01 kernel: Memory cgroup out of memory: Killed process 23793 (VLLM::Worker) total-vm:2623712kB\n"


def collected(*texts, known=(NVML,), carried=True):
    collector = Collector(known, carried=carried)
    for text in texts:
        collector.feed(parse(text))
    return collector


def carried(service, text):
    return "".join(f"{service}  | {line}\n" for line in text.splitlines())


@pytest.mark.parametrize("level", ["DEBUG", "INFO", "WARNING"])
def test_what_is_only_logged_ends_nothing(level):
    request = f"(APIServer pid=1) {level} 11-29 13:35:00 [logger.py:42] Received request: prompt: '{LOST.strip()}'\n"
    assert collected(request).diagnose() is None
    assert collected(request, RAISED).diagnose().signature is None
    assert collected(request).diagnose("ended with exit code 1").signature is None


def test_a_fatal_line_counts_as_the_last_word_and_not_from_long_ago():
    assert collected(UP, LOST).diagnose().signature == "gpus-lost"
    assert collected(LOST, UP * 300).diagnose() is None
    assert collected(LOST, UP * 300).diagnose("ended with exit code 1").signature is None


def test_a_fatal_line_goes_with_the_exception_beside_it_and_with_no_other():
    assert collected(LOST, RAISED).diagnose().signature == "gpus-lost"
    assert collected(LOST, UP * 300, RAISED).diagnose().signature is None
    assert collected(LOST, UP * 300, LOST, RAISED).diagnose().signature == "gpus-lost"
    assert collected(RAISED, UP * 300, LOST).diagnose().signature is None


def test_a_fatal_line_goes_with_a_long_traceback_that_begins_after_it():
    frame, code = RAISED.splitlines(keepends=True)[2:4]
    assert collected(LOST, RAISED.replace(frame + code, (frame + code) * 150)).diagnose().signature == "gpus-lost"


def test_a_fatal_line_of_the_traceback_itself_is_found_however_far_other_lines_stand_between():
    inside = RAISED.replace("probe()", "probe()  # Failed to initialize NVML")
    head, tail = inside.split("RuntimeError", 1)
    head = head[: head.rindex("(")]
    said = collected(head, UP * 300, f"(EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1010] RuntimeError{tail}")
    assert said.diagnose().signature == "gpus-lost"


def test_what_another_service_says_is_not_the_engines():
    found = collected(carried("webui-1", OTHERS), carried("vllm-1", UP + RAISED)).diagnose()
    assert found.root.text == "RuntimeError: never heard of"
    assert collected(carried("vllm-1", UP), carried("webui-1", OTHERS + LOST)).diagnose() is None
    usage = collected(carried("vllm-1", UP), carried("webui-1", "backup.py: error: no such option\n"))
    assert usage.diagnose() is None


def test_what_another_service_lives_through_does_not_revive_the_engine():
    life = carried("webui-1", "INFO:     Application startup complete.\n")
    printed = RAISED.replace("encountered a fatal error.", "said:").replace(
        "(EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1010] ", ""
    )
    assert collected(carried("vllm-1", UP + printed), life).diagnose() is not None


def test_traces_of_two_services_that_print_at_once_are_told_apart():
    ours = RAISED.replace("(EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1010] ", "").splitlines()[1:]
    pairs = zip(ours, OTHERS.splitlines(), strict=True)
    mixed = "".join(f"vllm-1  | {own}\nwebui-1  | {other}\n" for own, other in pairs)
    assert collected(carried("vllm-1", UP), mixed).diagnose().root.text == "RuntimeError: never heard of"


@pytest.mark.parametrize(
    "line",
    [
        UP,
        "WARNING 11-29 13:35:00 [a.py:1] x\n",
        "aerie: starting\n",
        "usage: vllm serve [model_tag] [options]\n",
        '  File "/v/site-packages/vllm/a.py", line 5, in forward\n',
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n",
    ],
)
def test_lines_that_vllm_alone_writes(line):
    assert collected(line).is_vllms


@pytest.mark.parametrize(
    "line", [OTHERS, "INFO:     Application startup complete.\n", XID, "2026 [emerg] bind() failed\n"]
)
def test_lines_that_anybody_writes(line):
    assert not collected(line).is_vllms


def test_the_kernels_lines_of_the_log_explain_a_silent_end():
    found = collected(UP, XID, GONE).diagnose()
    assert found.kind is Kind.HARDWARE
    assert "fell off the bus" in found.evidence[0]
    assert collected(UP, KILLED, GONE).diagnose().kind is Kind.MEMORY
    assert collected(UP, KILLED, GONE, known=None).diagnose().signature == "kernel-oom-kill-container"


def test_the_kernels_lines_of_the_log_do_not_end_an_engine_by_themselves_but_for_a_kill():
    assert collected(UP, XID).diagnose() is None
    assert collected(UP, KILLED).diagnose().kind is Kind.MEMORY


STARTED = "INFO:     Application startup complete.\n"
ASKED = "(APIServer pid=1) INFO 11-29 13:35:01 [launcher.py:254] [shutdown] API server: shutdown triggered\n"
BARE = "Memory cgroup out of memory: Killed process 4242 (python3) total-vm:2623712kB\n"


@pytest.mark.parametrize("name", ["python3", "vllm", "VLLM::Worker", "VLLM::EngineCor", "pt_main_thread"])
@pytest.mark.parametrize(
    "before", ["", "Nov 29 13:35:02 gpuhost kernel: ", "[ 1234.567890] ", "kernel: ", "[Sun Nov 29 13:35:02 2026] "]
)
def test_a_kill_for_memory_is_the_end_of_an_engine_that_said_nothing(before, name):
    found = collected(UP, before + BARE.replace("python3", name), known=None).diagnose()
    assert (found.signature, found.known) == ("kernel-oom-kill-container", True)
    host = BARE.replace("Memory cgroup out", "Out")
    assert collected(UP, before + host, known=None).diagnose().signature == "kernel-oom-kill-host"


def test_a_kill_of_another_program_is_not_blamed():
    assert collected(UP, KILLED.replace("VLLM::Worker", "mysqld")).diagnose() is None
    assert collected("a line\n", KILLED).diagnose() is None, "no engine was there"
    assert collected(KILLED, UP).diagnose() is None, "nor was it there yet"


@pytest.mark.parametrize("later", [STARTED, UP, UP.replace("13:35:00", "13:35:10"), "INFO: 127.0.0.1 - GET\n"])
def test_a_kill_that_the_engine_outlived_is_none_of_its_ends(later):
    assert collected(UP, KILLED, *[later] * 3).diagnose() is not None, "others may go on for a moment"
    assert collected(UP, KILLED, *[later] * 30).diagnose() is None
    assert collected(UP, KILLED, *[later] * 30, GONE).diagnose().kind is Kind.MEMORY, "a death is noticed later"


def test_a_kill_after_a_stop_was_asked_for_is_no_failure():
    assert collected(UP, ASKED, KILLED).diagnose() is None


@pytest.mark.parametrize("quoted", ["Out of memory: Killed process 7 (python3)", "vllm-1 exited with code 137", KILLED])
def test_what_an_engine_quotes_is_neither_the_kernels_nor_composes(quoted):
    """A request may hold such a line, which must not end an engine, hide its end, or reach a page without a key."""
    message = f'Traceback (most recent call last):\n  File "a.py", line 3, in f\nValueError: bad prompt:\n{quoted}\n'
    for said in (quoted, message):
        one = collected(UP, STARTED, said, known=None, carried=False)
        assert not one.dying
        found = one.diagnose("ended with exit code 1")
        assert found.evidence == ()
        assert found.kind is Kind.CRASH
    if quoted != KILLED:
        assert collected(UP, STARTED, message, known=None).diagnose().root.text.startswith("ValueError")


def ended(code, name="vllm-1"):
    return f"{name} exited with code {code}\n"


@pytest.mark.parametrize("name", ["vllm-1", "aerie-vllm-1", "project_vllm_1", "vllm"])
@pytest.mark.parametrize(
    ("code", "signature", "kind"),
    [
        (137, "container-killed", Kind.KILLED),
        (139, "worker-segfault", Kind.CRASH),
        (134, "worker-aborted", Kind.CRASH),
    ],
)
def test_the_code_with_which_the_container_ended_tells(name, code, signature, kind):
    for log in (UP, UP + STARTED + THROUGHPUT, UP + STARTED + CORE_STOPPED):
        found = collected(log, ended(code, name), known=None).diagnose()
        assert (found.signature, found.kind) == (signature, kind)
        assert found.root.text == ended(code, name).strip()


@pytest.mark.parametrize(
    "other", ["gcc", "redis-1", "aerie-gate-1", "SpawnProcess-1", "vllm-init-1", "vllm-exporter-1"]
)
@pytest.mark.parametrize("code", [0, 1, 137, 143])
def test_whose_container_ended_is_told_by_the_services_name(other, code):
    log = carried("vllm-1", UP) + carried(other, "aerie: EngineCore not there")
    assert collected(log, ended(137), known=None).diagnose().signature == "container-killed"
    for others in (collected(log, ended(code, other), known=None), collected(UP, ended(code, other), known=None)):
        assert others.diagnose() is None
        assert others.stopped is None
    assert collected(log, ended(code, other), carried("vllm-1", RAISED)).diagnose().root.text.startswith("RuntimeError")


def test_a_container_that_ended_by_itself_without_a_word_is_told():
    assert collected(UP, ended(1), known=None).diagnose().title == "The engine ended, and nothing says why"


@pytest.mark.parametrize("code", [0, 1, 137, 143])
def test_what_comes_after_an_end_counts(code):
    up, raised = carried("vllm-1", UP), carried("vllm-1", RAISED)
    assert collected(up, ended(code), raised).diagnose().root.text == "RuntimeError: never heard of"
    assert collected(up, ended(code), carried("vllm-1", STARTED)).diagnose() is None, "it was started again, and lives"


@pytest.mark.parametrize("code", [0, 130, 143])
def test_a_container_that_was_stopped_has_no_failure(code):
    assert collected(UP, ended(code)).diagnose() is None
    assert collected(UP, ASKED, ended(137)).diagnose() is None, "it took too long to stop, and was told to"


def test_what_was_raised_tells_more_than_the_containers_code():
    assert (
        collected(UP, OTHERS.replace("backup.py", "vllm"), ended(1)).diagnose().root.text.endswith("/srv/backup/list'")
    )
    assert collected(UP, RAISED, ended(1)).diagnose().root.text == "RuntimeError: never heard of"
    assert collected(UP, KILLED, ended(137), known=None).diagnose().signature == "kernel-oom-kill-container"


CORE_STOPPED = (
    "(EngineCore pid=7) INFO 11-29 13:35:01 [core.py:1454] [shutdown] EngineCore: trigger received signal=SIGTERM\n"
)
CORE_ASKED = "(MainProcess pid=1) INFO 11-29 13:35:01 [utils.py:628] [shutdown] Process manager: send sigterm to process EngineCore\n"


def test_an_api_server_that_is_gone_while_it_served_was_killed():
    found = collected(UP, STARTED, CORE_STOPPED, known=None).diagnose()
    assert (found.signature, found.kind, found.known) == ("api-server-vanished", Kind.KILLED, False)
    killed = collected(UP, STARTED, KILLED, CORE_STOPPED, known=None)
    assert killed.diagnose().signature == "kernel-oom-kill-container"


@pytest.mark.parametrize(
    "log",
    [
        UP + CORE_STOPPED,  # not up yet: as well somebody who stopped it
        UP + STARTED + ASKED + CORE_STOPPED,
        UP + STARTED + CORE_STOPPED + ASKED,
        UP + STARTED + CORE_ASKED + CORE_STOPPED,
        UP + STARTED + CORE_STOPPED + CORE_ASKED,
        UP + STARTED + "aerie: stopping\n" + CORE_STOPPED,
        UP + STARTED + CORE_STOPPED + "INFO:     Shutting down\n",
        UP + STARTED + "(APIServer pid=1) INFO:     Shutting down\n" + CORE_STOPPED,
        UP + STARTED + CORE_STOPPED.replace("SIGTERM", "SIGINT"),
    ],
)
def test_an_engine_that_was_told_to_stop_has_not_failed(log):
    assert collected(log, known=None).diagnose() is None


def test_a_line_that_decides_is_shown():
    for log in (UP + LOST, UP + LOST + RAISED):
        found = collected(log).diagnose()
        assert found.signature == "gpus-lost"
        assert LOST.strip() in found.text()
    assert "seen: Failed to initialize NVML" in collected(UP + LOST + RAISED).diagnose().text()


def test_the_line_about_a_process_goes_with_last_words_that_name_none():
    died = GONE.replace("None", "-11")
    found = collected(UP, "!!!!!!! Segfault encountered !!!!!!!\n", died, known=None).diagnose()
    assert found.root.text == "!!!!!!! Segfault encountered !!!!!!!"
    assert "seen: Worker proc VllmWorker-3 died unexpectedly (exit code: -11)" in found.text()
    assert "seen:" not in collected(UP, RAISED, died, known=None).diagnose().text()


def test_the_kernels_lines_long_before_the_end_do_not_belong_to_it():
    later = GONE.replace("13:35:01", "13:55:01")
    assert collected(UP, XID, UP * 300, later).diagnose().evidence == ()
    assert collected(UP, XID, UP * 300, GONE).diagnose().kind is Kind.HARDWARE, "much is logged in a minute"
    assert collected(UP, XID, later).diagnose().kind is Kind.HARDWARE, "and little in an hour without requests"


USAGE = "usage: vllm serve [model_tag] [options]\nvllm serve: error: argument --port: invalid int value: 'x'\n"
REFUSED = """\
Traceback (most recent call last):
  File "/v/bin/vllm", line 8, in <module>
    sys.exit(main())
pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig
  Value error, CUDA graphs of NCCL do not go with cuda:0. [type=value_error, input_value=1, input_type=int]
"""


@pytest.mark.parametrize("known", [(), None])
@pytest.mark.parametrize("said", [USAGE, USAGE.replace("int value: 'x'", "choice: 'CUDA'"), REFUSED])
@pytest.mark.parametrize("kind", [None, Kind.KILLED])
def test_nothing_outside_overrules_a_configuration_that_vllm_refuses(said, known, kind):
    outside = [*parse_kernel(XID + KILLED), Evidence("cgroup", None, "oom_kill 1", kind=Kind.MEMORY)]
    found = collected(said, known=known).diagnose("vllm serve ended with exit code 2", outside, kind)
    assert found.kind is Kind.CONFIGURATION
    assert len(found.evidence) == 3
    assert collected(XID, KILLED, said, known=known).diagnose().kind is Kind.CONFIGURATION


@pytest.mark.parametrize(("outside", "kind"), [(XID, Kind.HARDWARE), (KILLED, Kind.MEMORY)])
def test_what_stands_outside_explains_a_worker_that_was_killed_without_a_word(outside, kind):
    for said in (GONE, GONE.replace("None", "-9"), ""):
        found = collected(said).diagnose("VLLM::Worker_TP3 (pid 7) died", parse_kernel(outside), Kind.KILLED)
        assert found.kind is kind


def at(clock, text):
    return text.replace("11-29 13:35:01", f"11-29 {clock}")


WORKERS = """\
(Worker_TP3 pid=9) ERROR 11-29 13:35:01 [multiproc_executor.py:1063] WorkerProc hit an exception.
(Worker_TP3 pid=9) ERROR 11-29 13:35:01 [multiproc_executor.py:1063] Traceback (most recent call last):
(Worker_TP3 pid=9) ERROR 11-29 13:35:01 [multiproc_executor.py:1063]   File "/v/site-packages/vllm/a.py", line 5, in forward
(Worker_TP3 pid=9) ERROR 11-29 13:35:01 [multiproc_executor.py:1063] ValueError: bad shape
"""
QUOTING = RAISED.replace(
    "RuntimeError: never heard of", "RuntimeError: Worker failed with error 'bad shape', please check"
)
TIMED_OUT = RAISED.replace("RuntimeError: never heard of", "TimeoutError: RPC call to sample_tokens timed out.")
THROUGHPUT = "(APIServer pid=1) INFO 11-29 13:35:01 [loggers.py:1] Engine 000: Avg prompt throughput: 0.0 tokens/s\n"
ANSWERED = '(APIServer pid=1) INFO:     127.0.0.1:5 - "GET /metrics HTTP/1.1" 200 OK\n'


@pytest.mark.parametrize("life", [THROUGHPUT, ANSWERED, at("13:35:02", THROUGHPUT), at("13:35:00", THROUGHPUT)])
def test_what_is_answered_while_a_worker_dies_does_not_outlive_it(life):
    assert collected(UP, WORKERS, life).diagnose().root.text == "ValueError: bad shape"
    assert collected(UP, WORKERS, life, QUOTING).diagnose().root.text == "ValueError: bad shape"


@pytest.mark.parametrize("ending", [QUOTING, TIMED_OUT, RAISED.replace("never heard of", "cancelled")])
def test_the_core_dies_of_what_a_worker_said_however_long_others_were_answered_since(ending):
    life = "".join(at(f"13:3{minute}:07", THROUGHPUT) + ANSWERED for minute in range(5, 9))
    found = collected(UP, WORKERS, life, at("13:39:01", ending)).diagnose()
    assert (found.root.text, found.root.process) == ("ValueError: bad shape", "Worker_TP3")


def test_what_a_worker_said_and_outlived_does_not_explain_another_end():
    life = at("13:36:07", THROUGHPUT)
    assert collected(UP, WORKERS, life).diagnose() is None
    assert collected(UP, WORKERS, life, at("13:39:01", RAISED)).diagnose().root.text == "RuntimeError: never heard of"
    assert "died unexpectedly" in collected(UP, WORKERS, life, at("13:39:01", GONE)).diagnose().root.text
    newer = at("13:35:04", WORKERS.replace("bad shape", "newer"))
    nearest = collected(UP, WORKERS, newer, life, at("13:39:01", QUOTING)).diagnose()
    assert nearest.root.text == "ValueError: newer"
    assert "Worker failed" in collected(UP, WORKERS, life, at("13:59:01", QUOTING)).diagnose().root.text


def test_a_fatal_line_is_not_outlived_in_the_same_second():
    beside = RAISED.replace("11-29 13:35:01", "11-29 13:35:02")
    assert collected(UP, UP.replace("13:35:00", "13:35:01"), LOST, ANSWERED, beside).diagnose().signature == "gpus-lost"
    assert collected(UP, LOST, at("13:36:01", THROUGHPUT), beside).diagnose().signature is None
