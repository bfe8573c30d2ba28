"""A Hub on loopback, for the tests: the API as huggingface_hub calls it, files by redirect, faults by rule, counters.

As a program it serves the repositories DIR/OWNER/NAME/...: `python tests/hub_server.py DIR [--port N]`, and
GET /_counters tells what it sent.
"""

import argparse
import contextlib
import hashlib
import json
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable  # noqa: TC003 - a type alone
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, unquote, urlsplit

_IN_LFS = 64 * 1024
"""Bytes from which on a file is in LFS, as large ones are on the Hub."""
_PIECE = 256 * 1024


@dataclass
class Blob:
    """A file of a repository: bytes, or a file on disk."""

    content: bytes | Path
    lfs: bool | None = None
    xet_hash: str | None = None
    _digests: tuple[str, str] | None = None

    @property
    def size(self) -> int:
        return self.content.stat().st_size if isinstance(self.content, Path) else len(self.content)

    @property
    def in_lfs(self) -> bool:
        return self.size >= _IN_LFS if self.lfs is None else self.lfs

    @property
    def digests(self) -> tuple[str, str]:
        """Its SHA-256 and its git SHA-1."""
        if self._digests is None:
            sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % self.size)  # noqa: S324 - git's
            for piece in self.pieces(0, self.size):
                sha256.update(piece)
                git.update(piece)
            self._digests = sha256.hexdigest(), git.hexdigest()
        return self._digests

    def pieces(self, start: int, end: int):
        if isinstance(self.content, bytes):
            for at in range(start, end, _PIECE):
                yield self.content[at : min(at + _PIECE, end)]
            return
        with self.content.open("rb") as file:
            file.seek(start)
            while start < end:
                piece = file.read(min(_PIECE, end - start))
                start += len(piece)
                yield piece


@dataclass
class Repository:
    """One repository: its branches, and what each commit holds."""

    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def commit(self, files: dict[str, bytes | Path | Blob], branch: str = "main") -> str:
        """Add a commit and let the branch name it."""
        blobs = {name: each if isinstance(each, Blob) else Blob(each) for name, each in files.items()}
        text = "".join(f"{name} {blob.digests[0]}\n" for name, blob in sorted(blobs.items()))
        sha = hashlib.sha1(text.encode("utf-8", "surrogatepass")).hexdigest()  # noqa: S324 - git's
        self.commits[sha] = blobs
        self.branches[branch] = sha
        return sha


@dataclass
class Fault:
    """What goes wrong with a request whose path and query the pattern is found in."""

    path: str
    times: int = 1 << 60
    method: str = "GET"
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut_at: int | None = None
    """The connection breaks before this offset of the file, where the request goes beyond it."""
    cut_after: int | None = None
    """The connection breaks after so many bytes of this answer."""
    reset: bool = False
    """It breaks with RST instead of FIN."""
    stall_at: int | None = None
    """As cut_at, but the connection stays open and silent."""
    trickle: float | None = None
    """Seconds between two bytes."""
    flip_at: int | None = None
    """This byte of the file is another one."""
    ignore_range: bool = False
    wrong_range: bool = False
    """Content-Range names other bytes than were asked for."""
    extra: int = 0
    """Bytes by which Content-Length is too short for what the file has (negative: claims more than comes)."""


class Hub:
    """The server; use it as a context manager. `url` is the endpoint, `cdn_url` another origin that holds the bytes."""

    def __init__(self, *, port: int = 0, pace: float | None = None, cdn_host: str = "localhost") -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults: list[Fault] = []
        self.pace = pace
        """Bytes a second over all connections."""
        self.token: str | None = None
        """What gated and private repositories ask for; any other token is refused everywhere."""
        self.sent = 0
        """Bytes of files that went out."""
        self.sent_of: dict[str, int] = {}
        """The same of each path."""
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        """Method, address, headers of each."""
        self.xet_endpoint = "local:///dev/null/none"  # it makes the directory where it can
        self.signatures_valid = True
        self.lock = threading.Lock()
        self.change: Callable[[str, Any], Any] = lambda _kind, answer: answer
        """Changes an answer of the API before it is sent."""
        self._next = 0.0
        self._closing = threading.Event()
        handler = type("BoundHandler", (_Handler,), {"hub": self})
        self._servers = [_Server(("127.0.0.1", port), handler), _Server(("127.0.0.1", 0), handler)]
        self.url = f"http://127.0.0.1:{self._servers[0].server_port}"
        self.cdn_url = f"http://{cdn_host}:{self._servers[1].server_port}"

    def use_tls(self, certificate: Path, key: Path) -> None:
        """Speak TLS from now on; before the block is entered."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        for server in self._servers:
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        self.url, self.cdn_url = (each.replace("http:", "https:") for each in (self.url, self.cdn_url))

    def repository(self, name: str) -> Repository:
        return self.repositories.setdefault(name, Repository())

    def fault(self, path: str, **what: Any) -> Fault:
        fault = Fault(path, **what)
        self.faults.append(fault)
        return fault

    def take_fault(self, method: str, address: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and re.search(fault.path, address):
                    fault.times -= 1
                    return fault
        return None

    def count(self, path: str, number: int) -> None:
        with self.lock:
            self.sent += number
            self.sent_of[path] = self.sent_of.get(path, 0) + number

    def reset_counters(self) -> None:
        with self.lock:
            self.sent = 0
            self.sent_of = {}
            self.requests = []

    def wait_turn(self, number: int) -> None:
        if self.pace is None:
            return
        with self.lock:
            now = time.monotonic()
            self._next = max(self._next, now) + number / self.pace
            due = self._next
        time.sleep(max(0.0, due - now))

    def silence(self) -> None:
        """Wait until the server closes."""
        self._closing.wait()

    def __enter__(self) -> Self:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are killed break their connections; that is what they are for."""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    timeout = 300
    disable_nagle_algorithm = True

    def setup(self) -> None:
        # What lies in the socket's buffers when a client is killed was sent in vain, and counts.
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 256 * 1024 if self.hub.pace is None else 32 * 1024)
        super().setup()

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        with self.hub.lock:
            headers = {name.title(): value for name, value in self.headers.items()}
            self.hub.requests.append((self.command, self.path, headers))
        fault = self.hub.take_fault(self.command, self.path)
        if fault and fault.status is not None:
            self._answer(fault.status, b"as the test wants it\n", fault.headers)
            return
        path = unquote(urlsplit(self.path).path)
        if path == "/_counters":
            self._json({"sent": self.hub.sent, "sent_of": self.hub.sent_of})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._info(match[1], match[2] or "main")
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/xet-read-token/(.+)", path):
            self._xet_token(match[1])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(match[1], match[2], match[3], fault)
        elif match := re.fullmatch(r"/cdn/([^/]+/[^/]+)/([0-9a-f]{40})/(.+)", path):
            self._cdn(match[1], match[2], match[3], fault)
        else:
            self._answer(404, b"no such address\n", {"X-Error-Code": "EntryNotFound"})

    def _repository(self, name: str) -> Repository | None:
        """The repository, or None and an answer where the Hub would refuse."""
        repository = self.hub.repositories.get(name)
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if given and self.hub.token is not None and given != self.hub.token:
            self._answer(401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif repository is None or (repository.private and not given):
            status = 404 if given else 401
            self._answer(status, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif repository.gated and not given:
            message = f"Access to model {name} is restricted. You must have access to it and be authenticated."
            self._answer(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": message})
        else:
            return repository
        return None

    def _info(self, name: str, revision: str) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        sha = repository.branches.get(revision, revision)
        if sha not in repository.commits:
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
            return
        siblings = []
        for path, blob in repository.commits[sha].items():
            sha256, git = blob.digests
            entry: dict[str, Any] = {"rfilename": path, "size": blob.size, "blobId": git}
            if blob.in_lfs:
                entry["lfs"] = {"sha256": sha256, "size": blob.size, "pointerSize": 134}
            siblings.append(entry)
        answer = {"_id": "1", "id": name, "modelId": name, "sha": sha, "private": repository.private, "tags": []}
        self._json(self.hub.change("info", {**answer, "siblings": siblings}))

    def _xet_token(self, name: str) -> None:
        if self._repository(name) is None:
            return
        expiry = str(int(time.time()) + 3600)
        headers = {"X-Xet-Cas-Url": self.hub.xet_endpoint, "X-Xet-Access-Token": "xet-token"}
        self._answer(200, b"{}", {**headers, "X-Xet-Token-Expiration": expiry})

    def _resolve(self, name: str, revision: str, path: str, fault: Fault | None) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        sha = repository.branches.get(revision, revision)
        blob = repository.commits.get(sha, {}).get(path)
        if blob is None:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        headers = {"X-Repo-Commit": sha}
        if not blob.in_lfs:
            self._bytes(path, blob, fault, {**headers, "ETag": f'"{blob.digests[1]}"'})
            return
        headers |= {"X-Linked-Size": str(blob.size), "X-Linked-Etag": f'"{blob.digests[0]}"'}
        if blob.xet_hash:
            refresh = f"{self.hub.url}/api/models/{name}/xet-read-token/{sha}"
            headers |= {"X-Xet-Hash": blob.xet_hash, "Link": f'<{refresh}>; rel="xet-auth"'}
        location = f"{self.hub.cdn_url}/cdn/{name}/{sha}/{quote(path)}?signature={time.monotonic_ns()}"
        self._answer(302, b"Found", {**headers, "Location": location})

    def _cdn(self, name: str, sha: str, path: str, fault: Fault | None) -> None:
        self._bytes(path, self.hub.repositories[name].commits[sha][path], fault, {})

    def _bytes(self, path: str, blob: Blob, fault: Fault | None, headers: dict[str, str]) -> None:
        fault = fault or Fault("")
        start, end, status = 0, blob.size, 200
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted and not fault.ignore_range:
            start, end = int(wanted[1]), min(int(wanted[2]) + 1, blob.size) if wanted[2] else blob.size
            if start >= blob.size:
                self._answer(416, b"", {"Content-Range": f"bytes */{blob.size}"})
                return
            status = 206
            shift = 1 if fault.wrong_range else 0
            headers["Content-Range"] = f"bytes {start + shift}-{end - 1 + shift}/{blob.size}"
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(end - start - fault.extra)}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self._send(path, blob, start, end - max(fault.extra, 0), fault)

    def _send(self, path: str, blob: Blob, start: int, end: int, fault: Fault) -> None:
        began, at = start, start
        stops = [each for each in (fault.cut_at, fault.stall_at) if each is not None and start <= each < end]
        if fault.cut_after is not None:
            stops.append(start + fault.cut_after)
        stop = min(stops, default=None)
        for whole in blob.pieces(start, end):
            piece = whole
            if fault.flip_at is not None and at <= fault.flip_at < at + len(piece):
                changed = bytearray(piece)
                changed[fault.flip_at - at] ^= 1
                piece = bytes(changed)
            if stop is not None and at + len(piece) > stop:
                piece = piece[: stop - at]
            step = 1 if fault.trickle else 32 * 1024 if self.hub.pace else len(piece) or 1
            for cut in range(0, len(piece), step):
                part = piece[cut : cut + step]
                self.hub.wait_turn(len(part))
                self.connection.sendall(part)
                self.hub.count(path, len(part))
                if fault.trickle:
                    time.sleep(fault.trickle)
            at += len(piece)
            if stop is not None and at >= stop:
                if fault.stall_at is not None and stop == fault.stall_at:
                    self.hub.silence()
                self._break(fault)
                return
        if fault.extra < 0 or at - began < 0:
            self._break(fault)

    def _break(self, fault: Fault) -> None:
        if fault.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def _json(self, content: Any) -> None:
        self._answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        for key, value in {"Date": self.date_time_string(), **headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def from_directory(hub: Hub, root: Path) -> None:
    """Serve each folder OWNER/NAME below `root` as a repository."""
    for folder in sorted(root.glob("*/*")):
        if folder.is_dir():
            files = {str(each.relative_to(folder)): each for each in sorted(folder.rglob("*")) if each.is_file()}
            sha = hub.repository(f"{folder.parent.name}/{folder.name}").commit(files)
            print(f"{folder.parent.name}/{folder.name} main = {sha}", flush=True)


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, metavar="DIR")
    parser.add_argument("--port", type=int, default=0, help="(default: one that is free, which is printed)")
    parser.add_argument("--pace", type=float, help="bytes a second for each connection (default: all that there is)")
    options = parser.parse_args()
    with Hub(port=options.port, pace=options.pace) as hub:
        from_directory(hub, options.root)
        print(f"HF_ENDPOINT={hub.url}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
