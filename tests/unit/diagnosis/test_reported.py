"""A log of the container: what its supervisor knew of an engine's end is told again."""

# ruff: noqa: E501 - a log's lines are as long as they are

import pytest

from aerie.diagnosis import Collector, Evidence, Kind, parse_kernel
from aerie.startup.lines import parse

UP = "(APIServer pid=1) INFO 11-29 13:35:00 [a.py:1] up\n"
GONE = "(EngineCore pid=7) ERROR 11-29 13:35:01 [multiproc_executor.py:315] Worker proc VllmWorker-3 died unexpectedly (exit code: -9), shutting down executor.\n"
RAISED = """\
(EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1010] EngineCore encountered a fatal error.
(EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1010] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1010]   File "/v/site-packages/vllm/a.py", line 5, in forward
(EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1010]     probe()
(EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1010] RuntimeError: never heard of
"""
KILLED = "Nov 29 13:34:57 host1 kernel: Memory cgroup out of memory: Killed process 23793 (VLLM::Worker) total-vm:2623712kB\n"


def collected(*texts):
    collector = Collector()
    for text in texts:
        collector.feed(parse(text))
    return collector


def carried(text):
    return "".join(f"vllm-1  | {line}\n" for line in text.splitlines())


KNEW = {
    "an evidence that the log has not": (GONE, "VLLM::Worker_TP3 (pid 7) died", parse_kernel(KILLED), Kind.KILLED),
    "a hang": (
        UP,
        "the engine hangs: no step for 240 s, requests running: 3",
        [Evidence("supervisor", 1e9, "the engine hangs: no step for 240 s, requests running: 3", kind=Kind.HUNG)],
        Kind.HUNG,
    ),
    "a cause that is not known": (RAISED, "vllm serve ended with exit code 1", [], None),
    "a silent end": (UP, "vllm serve ended with exit code 3", [], None),
}


@pytest.mark.parametrize("name", KNEW)
def test_the_supervisors_verdict_is_repeated(name):
    log, ended, evidence, kind = KNEW[name]
    knew = collected(log).diagnose(ended, evidence, kind)
    container = f"aerie: starting\n{log}aerie: failed; {ended}; next start 13:35:10 UTC\n{knew.text()}\n"
    turned = f"aerie: starting\n{log}{knew.text()}\naerie: failed; {ended}; next start 13:35:10 UTC\n"
    for written in (container, carried(container), turned):
        told = collected(written).diagnose()
        assert told.text() == knew.text()
        same = ("signature", "kind", "known", "title", "cause", "remedy", "evidence")
        assert [told.to_json()[field] for field in same] == [knew.to_json()[field] for field in same]
        assert (told.root and told.root.text) == (knew.root and knew.root.text)


def test_the_root_cause_is_told_of_the_report_where_the_log_lost_it():
    knew = collected(RAISED).diagnose("vllm serve ended with exit code 1")
    told = collected(knew.text() + "\n").diagnose()
    assert told.root.text == "RuntimeError: never heard of"
    assert told.title == knew.title


def test_lines_of_others_within_a_report_do_not_disturb_it():
    knew = collected(GONE).diagnose("VLLM::Worker_TP3 (pid 7) died", parse_kernel(KILLED), Kind.KILLED)
    told = collected("".join(f"{line}\n{UP}leaked\n" for line in knew.text().split("\n"))).diagnose()
    assert told.text() == knew.text()


def test_a_report_that_is_cut_off_is_none():
    knew = collected(UP).diagnose("the engine hangs: no step for 9 s", kind=Kind.HUNG)
    cut = knew.text().rsplit("\n", 4)[0]
    assert collected(UP, cut).diagnose() is None
    assert collected(UP, "-" * 100 + "\nno report\n" + "-" * 100 + "\n").diagnose() is None


def test_of_two_reports_the_last_counts():
    first, last = (collected("").diagnose(f"vllm serve ended with exit code {code}").text() for code in (1, 3))
    assert collected(f"{first}\n{last}\n").diagnose().text() == last


@pytest.mark.parametrize(
    ("said", "kind", "signature"),
    [
        (
            "aerie: failed; the start has stalled: nothing moved for 900 s while joining ranks; next start 13:35:10 UTC",
            Kind.HUNG,
            "start-stalled-joining-ranks",
        ),
        (
            "aerie: unready; the engine hangs: no step for 101 s, requests running: 1, waiting: 0",
            Kind.HUNG,
            "engine-hangs",
        ),
        ("aerie: failed; VLLM::Worker_TP1 (pid 8923) died; next start 23:12:36 UTC", Kind.KILLED, None),
        ("aerie: failed; vllm serve was killed by SIGKILL; next start 23:12:36 UTC", Kind.KILLED, None),
        ("aerie: failed; vllm serve ended with exit code 3; next start 23:12:36 UTC", Kind.CRASH, None),
        (
            "aerie: held; an engine before has not gone, and none starts beside it: process 7 survives SIGKILL for 30 s",
            Kind.HARDWARE,
            "process-stuck-in-driver",
        ),
    ],
)
def test_without_a_report_the_supervisors_words_count(said, kind, signature):
    told = collected(UP, said + "\n").diagnose()
    assert (told.kind, told.signature) == (kind, signature)
    assert "next start" not in told.text()


def test_what_holds_an_engine_before_it_starts_is_the_cause():
    told = collected(
        "aerie: held; key file /k does not exist: put one there; `aerie retry` in this container starts it anew\n"
    ).diagnose()
    assert (told.kind, told.known) == (Kind.CONFIGURATION, True)
    assert told.cause == "key file /k does not exist: put one there"
    assert "aerie retry" in told.remedy


def test_what_the_engine_said_counts_beside_the_supervisors_words():
    told = collected(RAISED, "aerie: failed; vllm serve ended with exit code 1; next start 13:35:10 UTC\n").diagnose()
    assert told.root.text == "RuntimeError: never heard of"


@pytest.mark.parametrize("phase", ["ready", "checking", "starting"])
def test_a_failure_that_is_over_is_none(phase):
    failed = "aerie: failed; the engine hangs: no step for 101 s; next start 23:12:36 UTC\n"
    report = collected(UP).diagnose("the engine hangs: no step for 9 s", kind=Kind.HUNG).text()
    assert collected(UP, failed, report, f"\naerie: {phase}\n").diagnose() is None


def test_a_failure_is_told_though_the_container_was_stopped_after_it():
    failed = "aerie: failed; the engine hangs: no step for 101 s; next start 23:12:36 UTC\n"
    assert collected(failed, "aerie: stopping\naerie: stopped\n").diagnose().kind is Kind.HUNG


def test_what_breaks_once_the_supervisor_was_stopped_is_no_failure():
    assert collected(UP, "aerie: stopping\n", RAISED).diagnose() is None


PRINTED = """\
Traceback (most recent call last):
  File "/v/bin/vllm", line 8, in <module>
    sys.exit(main())
  File "/v/site-packages/vllm/entrypoints/cli/main.py", line 120, in main
    args.dispatch_function(args)
RuntimeError: never heard of
"""


@pytest.mark.parametrize(
    "before", ["", f"{'-' * 100}\nDIAGNOSIS: cut off (crash)\n{'-' * 100}\naerie: the disk is full\n"]
)
def test_a_rule_that_belongs_to_no_report_swallows_no_traceback(before):
    told = collected(UP, before, "-" * 100 + "\n", PRINTED).diagnose()
    assert told.root.place == "vllm/entrypoints/cli/main.py:120 in main"


HANGS = "the engine hangs: no step for 101 s, requests running: 1, waiting: 0; VLLM::Worker_TP1 (pid 7586) is stopped (state T)"


@pytest.mark.parametrize("said", ["", f"aerie: failed; {HANGS}; next start 13:35:10 UTC\n"])
def test_a_printed_cause_that_is_not_known_is_repeated_only_where_this_reader_knows_none(said):
    idle = Evidence("supervisor", 1e9, "python3 (pid 7040) does nothing (state S)", kind=Kind.HUNG)
    old = Collector([]).diagnose(HANGS, [idle], Kind.HUNG)
    assert not old.known
    told = collected(UP, said, old.text()).diagnose()
    assert (told.signature, told.known) == ("engine-hangs-process-stopped", True)
    assert told.evidence == old.evidence


def test_the_evidence_that_was_printed_explains_what_the_printer_could_not():
    for known, outside in (("kernel-oom-kill-container", parse_kernel(KILLED)), ("process-stuck-in-driver", stuck())):
        old = Collector([]).diagnose("VLLM::Worker_TP3 (pid 7) died", outside, Kind.KILLED)
        told = collected(UP, old.text()).diagnose()
        assert (old.signature, told.signature) == (None, known)
        assert told.evidence == old.evidence


def test_a_printed_cause_that_is_known_stands():
    knew = collected(UP).diagnose("vllm serve was killed by SIGKILL", parse_kernel(KILLED), Kind.KILLED)
    assert collected(RAISED, knew.text()).diagnose().signature == "kernel-oom-kill-container"


def stuck():
    return [Evidence("supervisor", None, "process 7 survives SIGKILL for 30 s", kind=Kind.HARDWARE, meaning="x")]
