"""A status port whose answers a test writes."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

START = {
    "phases": [
        {"name": "configuring", "began": "2026-11-29T12:00:00Z", "ended": "2026-11-29T12:00:08Z", "fraction": 1.0,
         "detail": ""},
        {"name": "loading target", "began": "2026-11-29T12:00:08Z", "ended": None, "fraction": 0.41,
         "detail": "26 of 64 shards"},
        {"name": "loading drafter", "began": None, "ended": None, "fraction": None, "detail": ""},
    ],
    "phase": "loading target", "fraction": 0.33, "began": "2026-11-29T12:00:00Z", "ended": None,
    "eta": "2026-11-29T12:15:00Z", "remaining_seconds": 512.0, "moved": "2026-11-29T12:05:00Z", "moved_by": "read",
    "silent_seconds": 3.0, "stalled": False, "waiting_for": "rank 3: 41.2 GB read",
}  # fmt: skip

DIAGNOSIS = {
    "signature": "eagle3-target-not-listed", "known": True, "title": "vLLM refuses the target for EAGLE-3",
    "cause": "The model is not in the list of targets.", "remedy": "Use an image whose series lists it.",
    "kind": "configuration", "severity": "fatal", "source": "vllm/config/speculative.py (0.17.1)",
    "root": {"text": "ValueError: eagle3 is only supported for [...]", "process": "APIServer", "pid": 77,
             "file": "vllm/config/speculative.py", "line": 812, "function": "_verify_args", "chain": [],
             "excerpt": ["(APIServer pid=77) ValueError: eagle3 is only supported for [...]"]},
    "evidence": [], "at": "2026-11-29T12:06:00Z", "report": "/var/lib/aerie/crashes/1.txt",
    "text": "-----\nDIAGNOSIS: vLLM refuses the target for EAGLE-3\n\nWhat to do\n  Use an image that lists it.\n-----",
}  # fmt: skip

STATE = {
    "schema": 2,
    "phase": "starting",
    "since": "2026-11-29T12:00:00Z",
    "reason": None,
    "model": "kimi",
    "start": START,
    "engine": {"pid": 7, "starts": 1, "started": "2026-11-29T12:00:00Z", "exit": None},
    "diagnosis": None,
    "serving": None,
    "speculation": None,
    "last_line": "",
    "next_start": None,
    "failures": 0,
    "hangs": 0,
    "versions": {"aerie": "0.1.0", "vllm": None},
}


@pytest.fixture(scope="session")
def state():
    """Return a function that gives a state with some of its fields changed, and some of its start's."""
    return lambda start=(), **changes: STATE | {"start": None if start is None else START | dict(start)} | changes


@pytest.fixture(scope="session")
def diagnosis():
    """The `diagnosis` of a state whose engine has failed."""
    return dict(DIAGNOSIS)


@pytest.fixture(scope="session")
def say():
    """Return a function that lets a status port tell one state after the other, and the last for ever."""

    def say_(answers, *states, path="/status"):
        left = list(states)
        answers[path] = (200, lambda _body: json.dumps(left.pop(0) if len(left) > 1 else left[0]))

    return say_


@contextlib.contextmanager
def serving():
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
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield table
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def shared_answers():
    """A status port for the tests of a module, see `serving`."""
    with serving() as table:
        yield table


@pytest.fixture
def answers():
    """A status port for one test, see `serving`."""
    with serving() as table:
        yield table
