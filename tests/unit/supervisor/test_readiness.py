"""The watch over one engine, against a small server and with the patience of a test."""

import asyncio
import itertools
import json
import os
import threading
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from aerie.engine_metrics import Speculation
from aerie.startup.activity import Activity, ProcessActivity
from aerie.supervisor import liveness, readiness
from aerie.supervisor.arguments import EngineArguments
from aerie.supervisor.liveness import Dead, Hung
from aerie.supervisor.state import Answered, Refused, Served

PATIENCE = 120.0  # seconds until a test gives up; none waits that long but to fail
SPECULATION = (
    "vllm:spec_decode_num_drafts_total {0}\n"
    "vllm:spec_decode_num_draft_tokens_total {1}\n"
    "vllm:spec_decode_num_accepted_tokens_total {2}\n"
)
FIGURES = (
    "vllm:iteration_tokens_total_count {0}\n"
    "vllm:num_requests_running {1}\n"
    "vllm:kv_cache_usage_perc 0.25\n"
    "vllm:generation_tokens_total {2}\n"
)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    for name, seconds in {
        "_FIRST_POLLS": 0.02, "_POLL": 0.02, "_LATE": PATIENCE, "_SILENT": 0.8, "_LET_GO": 0.3, "_LOOK_AGAIN": 0.1,
        "_OBSERVE": 0.02, "_COUNTED_WITHIN": 0.1,
    }.items():  # fmt: skip
        monkeypatch.setattr(readiness, name, seconds)
    monkeypatch.setattr(liveness, "GRACE", 0.5)
    monkeypatch.setattr(liveness, "_ASK_AFTER", 0.2)
    # It works; and /proc is not read for each of the many looks.
    monkeypatch.setattr(readiness, "sample", lambda _: process(faults=int(time.monotonic() * 1000)))


class Endpoints:
    """The routes that the watch asks, each answer changeable while it runs."""

    def __init__(self):
        self.health = 200
        self.late = self.late_after_this = False
        self.hangs = False
        self.running = 0
        self.engines = 1
        self.steps = 0
        self.steps_a_look = 0
        self.drafts = 0
        self.drafts_a_completion = 5
        self.speculates = True
        self.completion_status = 200
        self.completion_takes = 0.0
        self.models = {"data": [{"id": "kimi", "max_model_len": 4096}]}
        self.asked, self.ranks = [], []
        self.completions = []

    def checks(self):
        return [asked for asked in self.completions if asked["max_tokens"] > 1]

    async def answer(self, request):
        self.asked.append((request.path, request.headers.get("Authorization")))
        if "X-data-parallel-rank" in request.headers:
            self.ranks.append(request.headers["X-data-parallel-rank"])
        if self.late and request.path == "/health":
            await asyncio.sleep(0.3)
        match request.path:
            case "/health":
                self.late = self.late or self.late_after_this
                return web.Response(status=self.health)
            case "/metrics":
                self.steps += self.steps_a_look
                speculation = SPECULATION.format(self.drafts, 3 * self.drafts, self.drafts) * self.speculates
                figures = FIGURES.format(self.steps, self.running, 7 * self.steps)
                if self.engines > 1:
                    lines = [line.rpartition(" ") for line in figures.splitlines()]
                    figures = "".join(
                        f'{name}{{engine="{engine}"}} {value}\n'
                        for name, _, value in lines
                        for engine in range(self.engines)
                    )
                return web.Response(text=speculation + figures)
            case "/v1/models":
                return web.json_response(self.models)
        asked = json.loads(await request.text())
        assert asked["model"] == "kimi"
        self.completions.append(asked | {"at": time.monotonic()})
        await asyncio.sleep(3600 if self.hangs else self.completion_takes)
        self.steps += 1
        self.drafts += self.drafts_a_completion
        answer = {"usage": {"prompt_tokens": 64, "completion_tokens": asked["max_tokens"]}}
        return web.json_response(answer, status=self.completion_status)


@asynccontextmanager
async def watched(tmp_path, served_name="kimi", stalls=PATIENCE, **answers):
    """Yield (endpoints, events, the watch's task)."""
    endpoints, events = Endpoints(), []
    vars(endpoints).update(answers)
    keys = tmp_path / "api-keys"
    keys.write_text("first-key\nsecond-key\n")
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", endpoints.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    endpoints.url = f"http://{host}:{port}"
    arguments = EngineArguments(endpoints.url, port, "m", served_name, None, None)
    task = asyncio.create_task(readiness.watch(arguments, keys, stalls, os.getpid(), events.append))
    try:
        yield endpoints, events, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await runner.cleanup()


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


def run(scenario):
    asyncio.run(scenario)


def test_ready_after_a_completion_that_drafted(tmp_path):
    async def scenario():
        async with watched(tmp_path) as (endpoints, events, _):
            await until(lambda: len(events) >= 2)
            assert events[:2] == [Answered(), Served(Speculation(5, 15, 5))]
            assert ("/v1/completions", "Bearer first-key") in endpoints.asked

    run(scenario())


def test_that_requests_may_come_is_said_before_anything_else_is_looked_at(tmp_path, monkeypatch):
    """What the engine writes from then on may quote one."""
    looked = threading.Event()
    monkeypatch.setattr(readiness, "_look_at", lambda _: looked.wait(PATIENCE))

    async def scenario():
        async with watched(tmp_path) as (_, events, _task):
            await until(lambda: events)
            looked.set()
            assert events == [Answered()]
        monkeypatch.setattr(readiness, "_LATE", 0.1)
        async with watched(tmp_path, late=True) as (_, events, _task):
            await until(lambda: events)
            assert events == [Answered()]

    run(scenario())


def test_counters_are_read_again_and_again(tmp_path):
    async def scenario():
        async with watched(tmp_path) as (endpoints, events, _):
            await until(lambda: len(events) >= 2)
            endpoints.drafts = 50
            await until(lambda: getattr(events[-1], "speculation", None) == Speculation(50, 150, 50))

    run(scenario())


def test_an_engine_without_speculation_needs_no_drafts(tmp_path):
    async def scenario():
        async with watched(tmp_path, speculates=False) as (_, events, _task):
            await until(lambda: len(events) >= 2)
            assert events[:2] == [Answered(), Served(None)]

    run(scenario())


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"drafts_a_completion": 0}, "the drafter drafted nothing"),
        ({"completion_status": 500}, "/v1/completions answered 500"),
        ({"models": {"data": [{"id": "other"}]}}, "/v1/models offers other, and not kimi"),
        ({"models": {"no": "data"}}, "not in the form of OpenAI's API"),
    ],
)
def test_a_check_that_fails_says_why_and_is_made_again(tmp_path, answers, reason):
    async def scenario():
        async with watched(tmp_path, **answers) as (endpoints, events, _):
            await until(lambda: any(isinstance(event, Refused) for event in events))
            assert reason in next(event.reason for event in events if isinstance(event, Refused))
            vars(endpoints).update(vars(Endpoints()) | {"asked": endpoints.asked, "drafts": endpoints.drafts})
            await until(lambda: isinstance(events[-1], Served))

    run(scenario())


def test_the_answer_to_our_own_completion_is_taken_when_it_comes(tmp_path, monkeypatch):
    monkeypatch.setattr(readiness, "_POLL", 3600)

    async def scenario():
        async with watched(tmp_path, completion_takes=0.1) as (_, events, _task):
            await until(lambda: len(events) >= 2)
            assert isinstance(events[1], Served)

    run(scenario())


def test_a_driver_that_does_not_answer_keeps_nobody_from_ending(tmp_path, monkeypatch):
    monkeypatch.setattr(readiness, "_LATE", 0.1)
    answers = threading.Event()
    monkeypatch.setattr(readiness, "sample", lambda _: answers.wait(PATIENCE) and process())
    monkeypatch.setattr(readiness, "_SEEN_WITHIN", 0.1)
    watchdog = threading.Timer(PATIENCE / 12, answers.set)
    watchdog.start()

    async def scenario():
        async with watched(tmp_path) as (_, events, _task):
            await until(lambda: events)

    run(scenario())
    assert not answers.is_set(), "the end waited for it"
    watchdog.cancel()
    answers.set()


def test_a_hang_is_found_though_a_driver_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(readiness, "_LATE", 0.1)
    answers = threading.Event()
    monkeypatch.setattr(readiness, "sample", lambda _: answers.wait(PATIENCE) and process())
    monkeypatch.setattr(readiness, "_SEEN_WITHIN", 0.1)

    async def scenario():
        async with watched(tmp_path) as (endpoints, events, task):
            await until(lambda: len(events) >= 2)
            endpoints.hangs = True
            await until(task.done)
            assert isinstance(task.result(), Hung)
            assert not answers.is_set()

    run(scenario())
    answers.set()


def test_a_slow_first_completion_is_waited_for(tmp_path):
    async def scenario():
        async with watched(tmp_path, completion_takes=0.5) as (_, events, _task):
            await until(lambda: len(events) >= 2)
            assert isinstance(events[1], Served)

    run(scenario())


def test_before_the_first_good_answer_nothing_is_wrong(tmp_path):
    async def scenario():
        async with watched(tmp_path, health=404) as (endpoints, events, task):
            await until(lambda: len(endpoints.asked) > 2)
            await asyncio.sleep(0.4)  # longer than a dead engine is left alone
            assert events == []
            assert not task.done()
            endpoints.health = 200
            await until(lambda: events)

    run(scenario())


def test_a_dead_engine_whose_api_server_stays_is_given_up(tmp_path):
    async def scenario():
        async with watched(tmp_path) as (endpoints, events, task):
            await until(lambda: len(events) >= 2)
            endpoints.health, begun = 503, time.monotonic()
            await until(task.done)
            assert time.monotonic() - begun >= 0.3, "an API server may end by itself"
            assert events[-1] == Refused("/health answered 503")
            assert task.result() == Dead("/health answered 503")

    run(scenario())


def test_an_engine_that_recovers_is_checked_again(tmp_path):
    async def scenario():
        async with watched(tmp_path) as (endpoints, events, task):
            await until(lambda: len(events) >= 2)
            endpoints.health = 503
            await until(lambda: isinstance(events[-1], Refused))
            endpoints.health = 200
            before = len(endpoints.checks())
            await until(lambda: isinstance(events[-1], Served))
            assert len(endpoints.checks()) == before + 1
            await asyncio.sleep(0.4)
            assert not task.done()

    run(scenario())


def test_late_answers_make_it_unready_and_never_give_it_up(tmp_path, monkeypatch):
    async def scenario():
        async with watched(tmp_path) as (endpoints, events, task):
            await until(lambda: len(events) >= 2)
            monkeypatch.setattr(readiness, "_LATE", 0.1)
            endpoints.late, begun = True, time.monotonic()
            await until(lambda: isinstance(events[-1], Refused))
            assert time.monotonic() - begun > 0.4, "late once is not wrong"
            assert "busy or hung" in events[-1].reason
            await asyncio.sleep(0.4)
            assert not task.done()
            endpoints.late = False
            monkeypatch.setattr(readiness, "_LATE", PATIENCE)
            await until(lambda: isinstance(events[-1], Served))

    run(scenario())


def test_one_bad_answer_among_late_ones_does_not_give_it_up(tmp_path, monkeypatch):
    async def scenario():
        async with watched(tmp_path) as (endpoints, events, task):
            await until(lambda: len(events) >= 2)
            monkeypatch.setattr(readiness, "_LATE", 0.1)
            endpoints.health, endpoints.late_after_this = 503, True
            await until(lambda: isinstance(events[-1], Refused))
            await asyncio.sleep(0.6)
            assert not task.done()

    run(scenario())


def test_without_a_key_the_reason_names_the_file(tmp_path):
    async def scenario():
        async with watched(tmp_path, health=404) as (endpoints, events, _):
            (tmp_path / "api-keys").write_text("")
            endpoints.health = 200
            await until(lambda: len(events) >= 2)
            assert f"no key to ask with in {tmp_path}/api-keys" in events[1].reason

    run(scenario())


def process(state="S", faults=9):
    """A worker that spins and nothing else, and our stand-in for the API server beside it."""
    pids = {"vllm": os.getpid(), "VLLM::Worker_TP1": 77}
    return Activity(
        tuple(
            ProcessActivity(pid, name, state if pid == 77 else "S", 0, faults, 2**30, 1.0) for name, pid in pids.items()
        )
    )


def test_rates_come_with_the_counters(tmp_path):
    async def scenario():
        async with watched(tmp_path, running=3) as (endpoints, events, _):
            await until(lambda: len(events) >= 2)
            before = len(events)
            endpoints.steps += 100
            await until(lambda: any(event.serving.generation_tokens_per_second for event in events[before:]))
            serving = events[-1].serving
            assert (serving.requests_running, serving.requests_waiting, serving.kv_cache_usage) == (3, 0, 0.25)

    run(scenario())


def test_an_idle_engine_is_asked_for_one_token_now_and_then(tmp_path):
    async def scenario():
        async with watched(tmp_path) as (endpoints, events, task):
            await until(lambda: len(events) >= 2)
            await until(lambda: len(endpoints.completions) >= 5)
            checks = endpoints.checks()
            ours = [asked for asked in endpoints.completions if asked not in checks]
            assert len(checks) == 1
            pauses = [later["at"] - earlier["at"] for earlier, later in itertools.pairwise(ours)]
            assert min(pauses[1:]) > 0.19, "the first is a part of the check"
            assert all(asked["max_tokens"] == 1 and len(asked["prompt"]) == 64 for asked in ours)
            assert len({asked["cache_salt"] for asked in ours}) == len(ours), "no prefix may be known from before"
            assert not task.done()

    run(scenario())


@pytest.mark.parametrize("when", ["checking", "idle", "serving"])
def test_an_engine_that_makes_no_step_hangs_whenever_that_begins(tmp_path, monkeypatch, when):
    monkeypatch.setattr(readiness, "sample", lambda _: process(state="T"))
    stalls = PATIENCE
    if when == "checking":  # the first completion is a part of the start
        stalls = liveness.GRACE
        monkeypatch.setattr(liveness, "GRACE", PATIENCE)

    async def scenario():
        async with watched(tmp_path, stalls=stalls, hangs=when == "checking") as (endpoints, events, task):
            if when != "checking":
                await until(lambda: len(events) >= 2)
                endpoints.hangs = True
                endpoints.running = int(when == "serving")
            await until(task.done)
            hung = task.result()
            assert isinstance(hung, Hung)
            assert "VLLM::Worker_TP1 (pid 77) is stopped (state T)" in hung.reason
            assert events[-1] == Refused(hung.reason)
            assert any("vllm:iteration_tokens_total_count stands at" in line for line in hung.evidence)

    run(scenario())


def test_the_grace_follows_the_pace_that_the_engine_has_shown(tmp_path, monkeypatch):
    def spinning(_):
        return Activity((ProcessActivity(77, "VLLM::Worker_TP1", "R", 0, 9, 2**30, time.monotonic()),))

    monkeypatch.setattr(readiness, "sample", spinning)

    async def scenario():
        models = {"data": [{"id": "kimi", "max_model_len": 128}]}  # two prompts of our own sign of life
        async with watched(tmp_path, running=1, completion_takes=0.4, models=models) as (_, events, task):
            await until(lambda: any(isinstance(event, Served) for event in events))
            ready_at = time.monotonic()
            await until(task.done)
            assert isinstance(task.result(), Hung)
            assert time.monotonic() - ready_at > 0.5 + 2 * 2 * 0.4 - 0.2

    run(scenario())


def test_an_engine_that_makes_steps_never_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(readiness, "sample", lambda _: process())

    async def scenario():
        async with watched(tmp_path, running=128, steps_a_look=1) as (endpoints, events, task):
            await until(lambda: len(events) >= 2)
            endpoints.hangs = True  # a request of ours would wait behind all the others
            await asyncio.sleep(0.8)
            assert not task.done()
            assert len(endpoints.completions) == 2, "a busy engine is not asked"

    run(scenario())


def test_each_of_several_engines_is_asked_for_itself(tmp_path):
    async def scenario():
        async with watched(tmp_path, engines=2) as (endpoints, _, task):
            await until(lambda: {"0", "1"} <= set(endpoints.ranks))
            assert not task.done()

    run(scenario())


def test_a_refused_sign_of_life_makes_it_unready_until_a_check_passes(tmp_path):
    async def scenario():
        async with watched(tmp_path) as (endpoints, events, task):
            await until(lambda: len(events) >= 2)
            endpoints.completion_status = 500
            await until(lambda: isinstance(events[-1], Refused))
            assert "/v1/completions answered 500" in events[-1].reason
            endpoints.completion_status = 200
            await until(lambda: isinstance(events[-1], Served))
            assert not task.done()

    run(scenario())


def test_it_ends_when_it_is_told_to_whatever_it_waits_for(tmp_path, monkeypatch):
    """Told at the very moment at which an answer becomes late, among others."""
    monkeypatch.setattr(readiness, "_OBSERVE", 3600)  # so many that look would keep a slow machine from all else

    async def end(watch, moment):
        await asyncio.sleep(0.3 + moment / 500)
        watch.cancel()

    async def scenario():
        async with watched(tmp_path) as (endpoints, _, first):
            arguments = EngineArguments(endpoints.url, 0, "m", "kimi", None, None)
            events = []
            others = [
                asyncio.create_task(
                    readiness.watch(arguments, tmp_path / "api-keys", PATIENCE, os.getpid(), events.append)
                )
                for _ in range(40)
            ]
            await until(lambda: events.count(Answered()) >= len(others))
            monkeypatch.setattr(readiness, "_LATE", 0.1)
            endpoints.late = True
            watches = [first, *others]
            await asyncio.gather(*(end(watch, moment) for moment, watch in enumerate(watches)))
            _, going_on = await asyncio.wait(watches, timeout=PATIENCE)
            for watch in going_on:
                watch.cancel()
            assert not going_on

    run(scenario())
