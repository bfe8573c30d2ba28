"""How fast `aerie model fetch` takes a model from a server on loopback, beside curl and a bare copy from a socket.

`python tests/bench/fetch.py [--size GB] [--connections N] [--dir DIR]`, with src in PYTHONPATH. The server is a process
of its own that sends with sendfile. All share the cores of this machine, so that the ratios say more than the rates.
"""

import argparse
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

_HEADER_END = b"\r\n\r\n"


def serve(root: Path, ready: "threading.Event | None" = None) -> None:
    """Answer the Hub's three questions; bytes by sendfile. Prints its port."""
    files = {str(each.relative_to(root)): each for each in sorted(root.rglob("*")) if each.is_file()}
    siblings = [
        {
            "rfilename": name,
            "size": path.stat().st_size,
            "blobId": "0" * 40,
            "lfs": {"sha256": _sha256(path), "size": path.stat().st_size, "pointerSize": 134},
        }
        for name, path in files.items()
    ]
    info = json.dumps({"_id": "1", "id": "a/b", "modelId": "a/b", "sha": "1" * 40, "tags": [], "siblings": siblings})
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listener.getsockname()[1]
    print(port, flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection, files, info.encode(), port), daemon=True).start()


def _answer(connection: socket.socket, files: dict[str, Path], info: bytes, port: int) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    kept = b""
    while True:
        while _HEADER_END not in kept:
            piece = connection.recv(65536)
            if not piece:
                return
            kept += piece
        head, _, kept = kept.partition(_HEADER_END)
        lines = head.decode().split("\r\n")
        path = lines[0].split(" ")[1].partition("?")[0]
        if path.startswith("/api/"):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(info) + info)
        elif "/resolve/" in path:
            name = path.partition("/resolve/")[2].partition("/")[2]
            to = f"http://localhost:{port}/cdn/{name}"
            connection.sendall(f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode())
        else:
            file = files[path.removeprefix("/cdn/")]
            size = file.stat().st_size
            start, end = 0, size
            for line in lines[1:]:
                key, _, value = line.partition(": ")
                if key.lower() == "range":
                    first, _, last = value.removeprefix("bytes=").partition("-")
                    start, end = int(first), int(last) + 1 if last else size
            connection.sendall(
                f"HTTP/1.1 206 Partial Content\r\nContent-Length: {end - start}\r\n"
                f"Content-Range: bytes {start}-{end - 1}/{size}\r\n\r\n".encode()
            )
            with file.open("rb") as stream:
                while start < end:
                    start += os.sendfile(connection.fileno(), stream.fileno(), start, end - start)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def bare(port: int, names: list[str], out: Path) -> None:
    """Copy from the socket to files, one connection a file, and nothing else."""

    def one(name: str) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection, (out / name).open("wb") as file:
            connection.sendall(f"GET /cdn/{name} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            buffer = memoryview(bytearray(2**20))
            head = b""
            while _HEADER_END not in head:
                head += connection.recv(1)
            left = int(head.lower().partition(b"content-length: ")[2].split()[0])
            while left:
                count = connection.recv_into(buffer)
                file.write(buffer[:count])
                left -= count

    threads = [threading.Thread(target=one, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=4.0, help="GB, in four files")
    parser.add_argument("--connections", default="8")
    parser.add_argument("--dir", type=Path, help="where to work; the disk's speed counts")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        work = Path(folder)
        (work / "hub").mkdir()
        names = [f"model-{number}.safetensors" for number in range(4)]
        size = int(options.size * 1e9) // 4
        for name in names:
            with (work / "hub" / name).open("wb") as file:
                for at in range(0, size, 2**20):
                    file.write(os.urandom(min(2**20, size - at)))
        total = size * 4
        server = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(work / "hub")], stdout=subprocess.PIPE, text=True
        )
        try:
            port = int(server.stdout.readline())
            for name, run in {
                "bare sockets": lambda out: bare(port, names, out),
                "curl, one for each file": lambda out: _curl(port, names, out),
                "curl, then sha256sum": lambda out: (_curl(port, names, out), _sum(names, out)),
                "aerie model fetch": lambda out: _fetch(port, out, options.connections),
            }.items():
                out = work / "out"
                out.mkdir()
                began = time.monotonic()
                run(out)
                took = time.monotonic() - began
                print(f"{name:26} {took:6.2f} s  {total / took / 1e9:5.2f} GB/s", flush=True)
                shutil.rmtree(out)
        finally:
            server.terminate()
            server.wait()


def _curl(port: int, names: list[str], out: Path) -> None:
    children = [subprocess.Popen(["curl", "-sSo", out / name, f"http://127.0.0.1:{port}/cdn/{name}"]) for name in names]
    assert all(child.wait() == 0 for child in children)


def _sum(names: list[str], out: Path) -> None:
    children = [subprocess.Popen(["sha256sum", out / name], stdout=subprocess.DEVNULL) for name in names]
    assert all(child.wait() == 0 for child in children)


def _fetch(port: int, out: Path, connections: str) -> None:
    words = ["fetch", "a/b", "--models-dir", str(out), "--endpoint", f"http://127.0.0.1:{port}"]
    subprocess.run(
        [sys.executable, "-m", "aerie.cli", "model", *words, "--connections", connections],
        check=True,
        stdout=subprocess.DEVNULL,
    )


if __name__ == "__main__":
    main()
