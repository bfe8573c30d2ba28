"""The watch over one engine, against a small server and with the patience of a test."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from aerie.speculation import Speculation
from aerie.supervisor import readiness
from aerie.supervisor.arguments import EngineArguments
from aerie.supervisor.state import Answered, Refused, Served

COUNTERS = (
    "vllm:spec_decode_num_drafts_total {0}\n"
    "vllm:spec_decode_num_draft_tokens_total {1}\n"
    "vllm:spec_decode_num_accepted_tokens_total {2}\n"
)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    for name, seconds in {
        "_FIRST_POLLS": 0.02, "_POLL": 0.02, "_SILENT": 0.4, "_LET_GO": 0.4, "_LOOK_AGAIN": 0.1, "_COUNTED_WITHIN": 0.1,
    }.items():  # fmt: skip
        monkeypatch.setattr(readiness, name, seconds)
    monkeypatch.setattr(readiness, "_PROMPT", readiness.aiohttp.ClientTimeout(total=0.1))


class Endpoints:
    """The routes that the watch asks, each answer changeable while it runs."""

    def __init__(self):
        self.health = 200
        self.late = False
        self.drafts = 0
        self.drafts_a_completion = 5
        self.speculates = True
        self.completion_status = 200
        self.completion_takes = 0.0
        self.models = {"data": [{"id": "kimi"}]}
        self.asked = []

    async def answer(self, request):
        self.asked.append((request.path, request.headers.get("Authorization")))
        if self.late and request.path == "/health":
            await asyncio.sleep(0.3)
        match request.path:
            case "/health":
                return web.Response(status=self.health)
            case "/metrics":
                return web.Response(text=COUNTERS.format(self.drafts, 3 * self.drafts, self.drafts) * self.speculates)
            case "/v1/models":
                return web.json_response(self.models)
        assert json.loads(await request.text())["model"] == "kimi"
        await asyncio.sleep(self.completion_takes)
        self.drafts += self.drafts_a_completion
        answer = {"usage": {"completion_tokens": 16}}
        return web.json_response(answer, status=self.completion_status)


@asynccontextmanager
async def watched(tmp_path, served_name="kimi", **answers):
    """Yield (endpoints, events, the watch's task)."""
    endpoints, events = Endpoints(), []
    vars(endpoints).update(answers)
    keys = tmp_path / "api-keys"
    keys.write_text("first-key\nsecond-key\n")
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", endpoints.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    arguments = EngineArguments(f"http://{host}:{port}", port, "m", served_name, None)
    task = asyncio.create_task(readiness.watch(arguments, keys, events.append))
    try:
        yield endpoints, events, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await runner.cleanup()


async def until(condition, limit=3.0):
    async with asyncio.timeout(limit):
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


def test_counters_are_read_again_and_again(tmp_path):
    async def scenario():
        async with watched(tmp_path) as (endpoints, events, _):
            await until(lambda: len(events) >= 2)
            endpoints.drafts = 50
            await until(lambda: events[-1] == Served(Speculation(50, 150, 50)))

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
            await until(lambda: len(events) >= 2)
            assert reason in events[1].reason
            vars(endpoints).update(vars(Endpoints()) | {"asked": endpoints.asked, "drafts": endpoints.drafts})
            await until(lambda: isinstance(events[-1], Served))

    run(scenario())


def test_a_slow_first_completion_is_waited_for(tmp_path):
    async def scenario():
        async with watched(tmp_path, completion_takes=0.5) as (_, events, _task):
            await until(lambda: len(events) >= 2)
            assert isinstance(events[1], Served)

    run(scenario())


def test_before_the_first_good_answer_nothing_is_wrong(tmp_path):
    async def scenario():
        async with watched(tmp_path, health=404) as (endpoints, events, task):
            await asyncio.sleep(0.6)
            assert events == []
            assert not task.done()
            endpoints.health = 200
            await until(lambda: events)

    run(scenario())


def test_a_dead_engine_whose_api_server_stays_is_given_up(tmp_path):
    async def scenario():
        async with watched(tmp_path) as (endpoints, events, task):
            await until(lambda: len(events) >= 2)
            endpoints.health = 503
            await until(lambda: isinstance(events[-1], Refused))
            assert events[-1].reason == "/health answered 503"
            assert not task.done()
            await until(task.done)
            assert task.exception() is None

    run(scenario())


def test_an_engine_that_recovers_is_checked_again(tmp_path):
    async def scenario():
        async with watched(tmp_path) as (endpoints, events, task):
            await until(lambda: len(events) >= 2)
            endpoints.health = 503
            await until(lambda: isinstance(events[-1], Refused))
            endpoints.health = 200
            before = len([path for path, _ in endpoints.asked if path == "/v1/completions"])
            await until(lambda: isinstance(events[-1], Served))
            assert len([path for path, _ in endpoints.asked if path == "/v1/completions"]) == before + 1
            await asyncio.sleep(0.5)
            assert not task.done()

    run(scenario())


def test_late_answers_make_it_unready_and_never_give_it_up(tmp_path):
    async def scenario():
        async with watched(tmp_path) as (endpoints, events, task):
            await until(lambda: len(events) >= 2)
            endpoints.late = True
            await asyncio.sleep(0.2)
            assert not any(isinstance(event, Refused) for event in events), "late once is not wrong"
            await until(lambda: isinstance(events[-1], Refused))
            assert "busy or hung" in events[-1].reason
            await asyncio.sleep(1)
            assert not task.done()
            endpoints.late = False
            await until(lambda: isinstance(events[-1], Served))

    run(scenario())


def test_one_bad_answer_among_late_ones_does_not_give_it_up(tmp_path):
    async def scenario():
        async with watched(tmp_path) as (endpoints, events, task):
            await until(lambda: len(events) >= 2)
            endpoints.health = 503
            await until(lambda: isinstance(events[-1], Refused))
            endpoints.late = True
            await asyncio.sleep(1)
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
