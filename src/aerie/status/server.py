"""The HTTP server of the status port; it reads the one state and changes nothing."""

from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from aerie.status.metrics import exposition
from aerie.status.page import render

_Snapshot = Callable[[], Mapping[str, Any]]


async def serve_status(host: str, port: int, snapshot: _Snapshot) -> web.AppRunner:
    """Serve until `cleanup()` of what is returned; raises OSError where the port cannot be had."""

    async def page(_request: web.Request) -> web.Response:
        return web.Response(text=render(snapshot()), content_type="text/html")

    async def status(_request: web.Request) -> web.Response:
        return web.json_response(snapshot())

    async def ready(_request: web.Request) -> web.Response:
        state = snapshot()
        if state["phase"] == "ready":
            return web.json_response({"ready": True})
        return web.json_response({"ready": False, "phase": state["phase"], "reason": state["reason"]}, status=503)

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=exposition(snapshot()), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes(
        [web.get("/", page), web.get("/status", status), web.get("/ready", ready), web.get("/metrics", metrics)]
    )
    # The page is asked for every few seconds by people and probes; a line for each would bury the engine's.
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner
