"""An SSH server of the tests' own on loopback: Debian's sshd, unpacked and never installed, with its own keys."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from service import PROJECT_DIR

SSHD = PROJECT_DIR / "sshd"
PRIVILEGE_SEPARATION = Path("/run/sshd")
# sshd wants a user of its own, which only an installed one has: it sees an /etc/passwd that nobody else does.
START = 'mount --bind "$1" /etc/passwd && exec "$2" -D -e -f "$3"'


class Server:
    """The server on 127.0.0.1:`port`, for root with the key in `key`; `cut` and `stop` do what networks do.

    It gives nobody a terminal, as some hosts do.
    """

    def __init__(self, directory: Path) -> None:
        self.key = directory / "key"
        self._directory = directory
        self._program = SSHD / "usr/sbin/sshd"
        for name in ("key", "host_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / name], check=True, timeout=30
            )
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.port: int = taken.getsockname()[1]
        # Root's own .bashrc would run with every command: one that waits for a lock made each take a minute.
        users = f"root:x:0:0:root:{directory}:/bin/sh\nsshd:x:65534:65534::/run/sshd:/usr/sbin/nologin\n"
        (directory / "passwd").write_text(users)
        settings = {
            "Port": self.port, "ListenAddress": "127.0.0.1", "HostKey": directory / "host_key", "PidFile": "none",
            "AuthorizedKeysFile": directory / "key.pub", "StrictModes": "no", "UsePAM": "no",
            "PasswordAuthentication": "no", "PermitRootLogin": "prohibit-password", "PermitTTY": "no",
        }  # fmt: skip
        # From OpenSSH 9.8 and 10 on these are programs of their own.
        for option, name in (("SshdSessionPath", "sshd-session"), ("SshdAuthPath", "sshd-auth")):
            program = SSHD / "usr/lib/openssh" / name
            settings |= {option: program} if program.exists() else {}
        (directory / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        self._process: subprocess.Popen[bytes] | None = None
        self._made = not PRIVILEGE_SEPARATION.exists()

    def start(self) -> None:
        """Start listening."""
        PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
        libraries = next((SSHD / "usr/lib").glob("*/libwrap.so.0")).parent
        with (self._directory / "sshd.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", START, "sshd",
                 self._directory / "passwd", self._program, self._directory / "sshd_config"],
                env={**os.environ, "LD_LIBRARY_PATH": str(libraries)}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        deadline = time.monotonic() + 20
        while not self._listens():
            assert self._process.poll() is None, (self._directory / "sshd.log").read_text()
            assert time.monotonic() < deadline, "sshd does not listen"
            time.sleep(0.05)

    def sessions(self) -> list[int]:
        """The processes that serve one connection each."""
        assert self._process
        found = subprocess.run(
            ["pgrep", "--parent", str(self._process.pid)], capture_output=True, text=True, check=False
        ).stdout
        return [int(pid) for pid in found.split()]

    def cut(self) -> int:
        """End every connection as a network does, without a word; return how many there were."""
        sessions = self.sessions()
        for pid in sessions:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(sessions)

    def stop(self) -> None:
        """Stop listening, and cut what there is."""
        if self._process:
            self.cut()
            self._process.terminate()
            self._process.wait(20)
            self._process = None
        if self._made:
            with contextlib.suppress(OSError):
                PRIVILEGE_SEPARATION.rmdir()

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False
