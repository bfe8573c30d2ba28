"""The HTTP server of the status port; it reads the one state and changes nothing."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from aiohttp import hdrs, web
from prometheus_client import CONTENT_TYPE_LATEST

from aerie.gate.container import this_container
from aerie.status.metrics import exposition
from aerie.status.page import CONTENT_SECURITY_POLICY, render

_Snapshot = Callable[[], Mapping[str, Any]]

# For every answer, errors too: nothing here may be framed, guessed at, kept, or read by another site's page.
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


async def serve_status(host: str, port: int, snapshot: _Snapshot) -> web.AppRunner:
    """Serve until `cleanup()` of what is returned; raises OSError where the port cannot be had.

    `host` is an address of IPv4 or IPv6; port 0 takes a free one, which the runner's `addresses` tell.
    """
    container = this_container()

    async def page(_request: web.Request) -> web.Response:
        return web.Response(text=render(snapshot(), datetime.now(UTC), container), content_type="text/html")

    async def status(_request: web.Request) -> web.Response:
        return web.json_response(snapshot())

    async def ready(_request: web.Request) -> web.Response:
        state = snapshot()
        if state["phase"] == "ready":
            return web.json_response({"ready": True})
        return web.json_response({"ready": False, "phase": state["phase"], "reason": state["reason"]}, status=503)

    async def metrics(_request: web.Request) -> web.Response:
        body = exposition(snapshot(), datetime.now(UTC))
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: CONTENT_TYPE_LATEST})

    async def guard(_request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(_HEADERS)
        response.headers.pop(hdrs.SERVER, None)  # which names every version

    app = web.Application()
    app.on_response_prepare.append(guard)
    app.add_routes(
        [web.get("/", page), web.get("/status", status), web.get("/ready", ready), web.get("/metrics", metrics)]
    )
    # The page is asked for every second by people and probes; a line for each would bury the engine's.
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner
