#!/usr/bin/env python3
"""Stands in for `vllm serve` where a test is about the supervisor and a real engine would take half a minute.

It answers the few routes that the supervisor asks, keeps a second process as vLLM keeps its engine core, and does
what the STUB variable says: a JSON object with any of the keys read below.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

STUB = json.loads(os.environ.get("STUB", "{}"))
KEYS_FILE = Path(os.environ["AERIE_API_KEYS_FILE"])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    drafts = 0

    def do_GET(self):
        if self.path == "/health":
            return self.answer(200, "")
        if self.path == "/metrics":
            return self.answer(200, f'vllm:spec_decode_num_drafts_total{{engine="0"}} {float(Handler.drafts)}\n')
        if self.headers.get("Authorization", "").removeprefix("Bearer ") not in KEYS_FILE.read_text().split():
            return self.answer(401, "")
        if self.path == "/v1/models":
            return self.answer(200, json.dumps({"data": [{"id": STUB.get("serves", "kimi")}]}))
        return self.answer(404, "")

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        Handler.drafts += STUB.get("drafts", 5)
        answer = {
            "choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 4, "completion_tokens": 9},
        }
        self.answer(200, json.dumps(answer))

    def answer(self, status, text):
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


def core():
    """The second process: out of the engine's session and parent, deaf to SIGTERM, and alone on its lock."""
    if child := os.fork():
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        if os.fork():
            os._exit(0)
        os._exit(0)  # an orphan too, and soon a dead one
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lock = open("core.lock", "w")  # noqa: SIM115, PTH123 - held until the process dies
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        Path("two-cores").touch()
    time.sleep(600)


def drain(_number, _frame):
    print("draining", flush=True)
    time.sleep(STUB.get("drain", 0))
    print("drained", flush=True)
    os._exit(0)


def fail(_number, _frame):
    os.write(2, STUB["last"].encode() + b"\n")
    os._exit(1)


def main():
    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGUSR2, fail)
    Path("argv.json").write_text(json.dumps(sys.argv[1:]))
    Path("environ.json").write_text(json.dumps(dict(os.environ)))
    if STUB.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if STUB.get("core"):
        core()
    if "vital" in STUB:  # a process that calls itself as vLLM's do
        vital = subprocess.Popen([STUB["vital"], "600"], executable="/bin/sleep")
        Path("vital.pid").write_text(str(vital.pid))
    Path("runs").touch()
    if "writes" in STUB:
        sys.stdout.buffer.write(Path(STUB["writes"]).read_bytes())
        sys.stdout.buffer.flush()
    if "says" in STUB:
        print(STUB["says"], file=sys.stderr, flush=True)
    if "signal" in STUB:
        os.kill(os.getpid(), STUB["signal"])
    while STUB.get("hang"):
        time.sleep(1)
    if STUB.get("exit") is not None:
        sys.exit(STUB["exit"])
    time.sleep(STUB.get("boot", 0))
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


main()
