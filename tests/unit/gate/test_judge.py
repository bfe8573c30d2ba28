"""When the gate opens, and when it gives up."""

import pytest

from aerie.gate import state as state_module
from aerie.gate.judge import Memory, Verdict, judge, tell
from aerie.gate.state import NoState
from aerie.gate.words import Outlook, Step, step_of
from aerie.supervisor import state as supervisor_state

NOBODY = NoState("no answer from 127.0.0.1:8001: refused")


def look_on(*looks, stall_timeout=100):
    """Yield the judgement of each (second, look); between two of them the memory travels as text."""
    memory = Memory.at(0)
    for now, look in looks:
        memory, judgement = judge(Memory.from_text(memory.to_text()), look, now, stall_timeout)
        yield judgement


def verdict_after(*looks, stall_timeout=100):
    """Return the verdict after the last look; none may come after an earlier one."""
    found = [judgement.verdict for judgement in look_on(*looks, stall_timeout=stall_timeout)]
    assert not any(verdict is not None for verdict in found[:-1]), found
    return found[-1]


def test_it_reads_the_form_that_the_supervisor_writes():
    assert state_module.SCHEMA == supervisor_state.SCHEMA


def test_it_opens_when_ready(state):
    first, last = look_on((1, state()), (42, state(phase="ready", start={"ended": "2026-11-29T12:09:00Z"})))
    assert first.verdict is None
    assert str(first.step) == (
        "loading target: 26 of 64 shards, 41%, waiting for rank 3: 41.2 GB read; start 33%, about 9 min left"
    )
    assert (last.verdict, str(last.step)) == (Verdict.READY, "ready after 42 s")


@pytest.mark.parametrize("phase", ["held", "stopping", "stopped"])
def test_what_waits_for_a_person_is_a_failure_at_once(state, phase):
    (judgement,) = look_on((1, state(phase=phase, reason="no key")))
    assert (judgement.verdict, str(judgement.step)) == (Verdict.FAILED, f"{phase}: no key")


def test_a_failure_before_our_eyes_is_an_answer_and_brings_its_diagnosis(state, diagnosis):
    failed = state(phase="failed", failures=1, reason="killed", next_start="12:01", diagnosis=diagnosis)
    _, last = look_on((1, state()), (2, failed))
    assert (last.verdict, last.diagnosis) == (Verdict.FAILED, diagnosis)
    assert str(last.step) == "failed: killed; next start at 12:01"


def test_a_stop_is_not_explained_with_an_old_failure(state, diagnosis):
    (judgement,) = look_on((1, state(phase="stopping", reason="a stop was asked for", diagnosis=diagnosis)))
    assert judgement.diagnosis is None


def test_a_failure_from_before_may_be_mended_by_the_next_start(state):
    earlier = state(phase="failed", failures=2)
    again = state(failures=2)
    assert verdict_after((1, earlier), (2, again), (3, state(phase="ready"))) is Verdict.READY
    assert verdict_after((1, earlier), (2, again), (3, earlier | {"failures": 3})) is Verdict.FAILED


def test_a_failure_counts_though_nobody_looked_when_it_began(state, diagnosis):
    judgements = list(look_on((1, state()), (30, state(failures=1, diagnosis=diagnosis))))
    assert judgements[-1].verdict is Verdict.FAILED
    assert judgements[-1].step.name == "the engine failed and is starting again"
    assert judgements[-1].diagnosis == diagnosis
    assert verdict_after((1, state()), (30, state(phase="ready", failures=1))) is Verdict.READY


def test_failures_that_were_forgiven_meanwhile_do_not_hide_a_new_one(state):
    three = state(phase="failed", failures=3)
    assert verdict_after((1, three), (2, state()), (9, state(phase="failed", failures=1))) is Verdict.FAILED


def test_an_engine_that_was_dying_when_we_came_has_failed_before(state):
    dying, dead = state(phase="unready", reason="/health answered 503"), state(phase="failed", failures=1)
    again = state(failures=1)
    assert verdict_after((0, dying), (6, dead), (16, again), (40, state(phase="ready"))) is Verdict.READY
    assert verdict_after((0, dying), (6, dead), (16, again), (20, dead | {"failures": 2})) is Verdict.FAILED


def test_unready_is_a_failure_when_it_stays(state):
    unready = state(phase="unready", reason="no drafts")
    assert verdict_after((0, unready), (24, unready)) is None
    assert verdict_after((0, unready), (24, unready), (25, unready)) is Verdict.FAILED
    assert verdict_after((0, unready), (20, state()), (21, unready), (40, unready)) is None


def test_whatever_the_supervisor_sees_moves_the_deadline(state):
    moves = [state(), state(start={"moved": "later"}), state(phase="checking"), state(phase="checking", start=None)]
    moves.append(state(phase="checking", engine={"starts": 2}))
    assert verdict_after(*[(90 * number, move) for number, move in enumerate(moves)]) is None


def test_how_long_a_start_may_stand_still_is_the_supervisor_s_to_say(state):
    silent = [(second, state(start={"silent_seconds": float(second)})) for second in range(0, 1000, 90)]
    assert verdict_after(*silent) is None


def test_a_state_that_stands_still_is_a_stall_whatever_the_time(state):
    # A fraction that is only estimated rises all the same.
    assert verdict_after((0, state()), (99, state(start={"fraction": 0.4}))) is None
    *_, last = look_on((0, state()), (99, state()), (100, state(start={"fraction": 0.5})))
    assert last.verdict is Verdict.STALLED
    assert str(last.step).startswith("nothing has moved for 2 min: loading target: 26 of 64 shards")


def test_the_supervisor_knows_a_stall_first(state, diagnosis):
    stalled = state(start={"stalled": True, "silent_seconds": 1800.0})
    (judgement,) = look_on((0, stalled | {"diagnosis": diagnosis | {"at": "2026-11-29T11:00:00Z"}}))
    assert (judgement.verdict, judgement.diagnosis) == (Verdict.STALLED, None), "that diagnosis is an older start's"
    assert judgement.step.name == "nothing has moved for 30 min"
    (judgement,) = look_on((0, stalled | {"diagnosis": diagnosis}))
    assert judgement.diagnosis == diagnosis
    ended = stalled | {"phase": "failed", "failures": 1, "diagnosis": diagnosis}
    *_, judgement = look_on((0, state()), (1, ended))
    assert (judgement.verdict, judgement.diagnosis) == (Verdict.STALLED, diagnosis)
    assert verdict_after((0, ended), (10, state(failures=1))) is None, "a stall from before is none of this start"


def test_nobody_there(state):
    assert verdict_after((0, NOBODY), (59, NOBODY)) is None
    *_, last = look_on((0, NOBODY), (60, NOBODY))
    assert (last.verdict, str(last.step)) == (Verdict.NOBODY, f"{NOBODY.why}, for 60 s")
    assert verdict_after((0, NOBODY), (59, state()), (61, NOBODY), (120, NOBODY)) is None
    assert verdict_after((0, NOBODY), (59, state()), (61, NOBODY), (121, NOBODY)) is Verdict.NOBODY


def test_silence_counts_only_while_somebody_listens(state):
    assert verdict_after((0, state()), (500, NOBODY), (559, NOBODY)) is None


def test_what_no_patience_can_cure_is_told_at_once():
    assert verdict_after((0, NoState("another schema", final=True))) is Verdict.NOBODY


def test_a_clock_that_started_anew_with_the_machine_ends_no_wait(state):
    assert verdict_after((5000, state()), (3, state()), (90, state())) is None
    assert verdict_after((5000, NOBODY), (3, NOBODY), (62, NOBODY)) is None
    assert verdict_after((5000, state()), (3, state()), (103, state())) is Verdict.STALLED


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"began": 1}', '{"began": "x", "moved": 1, "told": []}', "null"]
)
def test_another_text_is_not_the_memory_of_a_wait(text):
    with pytest.raises(ValueError):  # noqa: PT011 - json's own is one too
        Memory.from_text(text)


def test_the_memory_repeats_no_word_of_the_service(state):
    memory, judgement = judge(Memory.at(0), state(reason="token hf_secret", phase="unready"), 1, 100)
    assert "hf_secret" not in tell(memory, judgement.step, 1)[0].to_text()


def told_at(*steps):
    """Return the seconds at which a line is worth telling, of (second, step)."""
    memory, found = Memory.at(0), []
    for now, step in steps:
        memory, news = tell(memory, step, now)
        found += [now] if news else []
    return found


def test_a_step_is_told_when_it_begins_and_its_progress_now_and_then():
    loading = [
        (second, Step("loading target", f"{second} of 64", Outlook(0.1, 99 - second))) for second in range(1, 40)
    ]
    assert told_at(*loading, (40, Step("compiling"))) == [1, 16, 31, 40]


def test_an_estimate_alone_is_no_news():
    assert told_at(*[(second, Step("compiling", "", Outlook(0.1, 99 - second))) for second in range(0, 90, 9)]) == [0]


def test_no_control_character_of_a_log_reaches_a_terminal(state):
    step = step_of(state(phase="failed", reason="vllm serve died: \x1b[2Jboom\r\nsecond\x07"))
    assert str(step).isprintable()
    assert "boom" in str(step)
    assert str(step_of(state(start={"waiting_for": "rank \x1b[31m3"}))).isprintable()


def test_a_halt_of_a_supervisor_that_has_started_nothing_yet(state, diagnosis):
    """It was started anew, keeps an old diagnosis, and its pause is over."""
    held_up = state(start=None, diagnosis=diagnosis)
    verdict = verdict_after((0, held_up), (101, held_up))
    assert verdict is Verdict.STALLED
