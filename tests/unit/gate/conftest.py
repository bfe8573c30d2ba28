"""A status port whose answers a test writes."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

STATE = {
    "schema": 1,
    "phase": "starting",
    "step": "loading target",
    "progress": 0.5,
    "reason": None,
    "since": "2026-11-29T12:00:00Z",
    "model": "kimi",
    "engine": {"pid": 7, "starts": 1, "started": "2026-11-29T12:00:00Z", "exit": None},
    "last_error": None,
    "last_line": "",
    "next_start": None,
    "failures": 0,
    "speculation": None,
    "versions": {"aerie": "0.1.0", "vllm": None},
}


@pytest.fixture
def state():
    """Return a function that gives a state with some of its fields changed."""
    return lambda **changes: STATE | changes


@pytest.fixture
def answers():
    """Serve; yield a dict from path to (status, text or function of the request's JSON body), with its `url` in it."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            status, text = table.get(self.path, (404, "not found"))
            table["asked"].append((self.path, self.headers.get("Authorization"), body))
            data = (text(body) if callable(text) else text).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = answer

        def log_message(self, *_args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    table = {"url": f"http://127.0.0.1:{server.server_port}", "asked": []}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield table
    server.shutdown()
    server.server_close()
