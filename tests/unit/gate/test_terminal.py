"""`aerie wait` on a terminal, a real one for it: what stands on its screen."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "src"
STEERING = re.compile(r"\x1b\[(\d*)([AJm])|\x1b\[[0-9;]*m|([\r\n])|([^\x1b\r\n]+)")


class Screen:
    """A terminal as far as `aerie wait` steers one; it wraps what stands on it anew when it gets another width."""

    def __init__(self, columns):
        self.columns = columns
        self.lines = [""]
        self.line = self.column = 0

    def feed(self, text):
        at = 0
        while at < len(text):
            found = STEERING.match(text, at)
            assert found, f"steers by what it should not: {text[at : at + 20]!r}"
            at = found.end()
            count, what, control, words = found.groups()
            if words:
                line = self.lines[self.line].ljust(self.column)
                self.lines[self.line] = line[: self.column] + words + line[self.column + len(words) :]
                self.column += len(words)
            elif control == "\r":
                self.column -= self.column % self.columns
            elif control == "\n":
                self.line, self.column = self.line + 1, 0
                self.lines += [""] * (self.line + 1 - len(self.lines))
            elif what == "A":
                for _ in range(int(count or 1)):
                    self.up()
            elif what == "J":
                self.lines[self.line] = self.lines[self.line][: self.column]
                del self.lines[self.line + 1 :]

    def up(self):
        if self.column >= self.columns:
            self.column -= self.columns
        elif self.line:
            self.line -= 1
            rows = max(1, -(-len(self.lines[self.line]) // self.columns))
            self.column += (rows - 1) * self.columns


class Terminal:
    """`aerie wait` at a pseudo-terminal of so many columns."""

    def __init__(self, url, columns, *options, **environment):
        self.master, slave = pty.openpty()
        self.screen = Screen(columns)
        self.raw = ""
        self.resize(columns)
        settings = {"TERM": "xterm", "PYTHONPATH": str(SOURCE), "LC_ALL": "C.UTF-8", **environment}
        own = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "COLUMNS", "TERM"}}

        self.process = subprocess.Popen(
            ["setsid", "--ctty", sys.executable, "-m", "aerie.cli", "wait", *options, url],
            env=own | settings, stdin=slave, stdout=subprocess.PIPE, stderr=slave,
        )  # fmt: skip
        os.close(slave)

    def resize(self, columns):
        self.screen.columns = columns
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read(self, seconds=0.0):
        """Take what comes within `seconds` of the last that came; return whether there may come more."""
        while select.select([self.master], [], [], seconds)[0]:
            try:
                data = os.read(self.master, 65536).decode()
            except OSError:  # the other end is closed
                return False
            self.raw += data
            self.screen.feed(data)
        return True

    def until(self, condition, seconds=10.0):
        deadline = time.monotonic() + seconds
        while not condition(self.screen.lines):
            assert time.monotonic() < deadline, self.screen.lines
            self.read(0.05)

    def end(self):
        """Return (exit code, stdout) when it has ended."""
        while self.read(5.0) and self.process.poll() is None:
            pass
        code = self.process.wait(10)
        return code, self.process.stdout.read().decode()

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        os.close(self.master)


@pytest.fixture
def terminal(answers):
    with contextlib.ExitStack() as stack:

        def start(columns, *options, **environment):
            made = Terminal(answers["url"], columns, *options, **environment)
            stack.callback(made.close)
            return made

        yield start


@pytest.fixture
def service(answers, state):
    """Say this state from now on."""

    def say(**changes):
        answers["/status"] = (200, json.dumps(state(**changes)))

    say()
    return say


def loading(lines):
    return len(lines) == 2 and "41%" in lines[0] and "33%" in lines[1]


def test_two_lines_are_drawn_again_in_their_place(terminal, service):
    shown = terminal(80)
    shown.until(loading)
    assert all(len(line) < 80 for line in shown.screen.lines)
    service(start={"phase": "loading drafter", "fraction": 0.5, "remaining_seconds": 30.0, "waiting_for": None})
    shown.until(lambda lines: len(lines) == 2 and "50%" in lines[1])
    assert shown.screen.lines[0].split() == ["loading", "drafter", "about", "30", "s", "left"]
    service(phase="ready")
    assert shown.end() == (0, "")
    assert re.fullmatch(r"http://\S+: ready after \d+ s", shown.screen.lines[0])
    assert shown.screen.lines[1:] == [""], "one clean line is left, and the cursor below it"


def test_the_time_that_passes_is_seen(terminal, service):
    shown = terminal(80)
    shown.until(lambda lines: loading(lines) and lines[1].endswith("0:02"))


@pytest.mark.parametrize("columns", [48, 20, 200])
def test_another_width_is_taken_at_once_and_leaves_nothing_behind(terminal, service, columns):
    shown = terminal(100)
    shown.until(loading)
    drawn = len(shown.raw)
    shown.resize(columns)
    began = time.monotonic()
    while len(shown.raw) == drawn:
        shown.read(0.01)
    # Half a second is the pause without a change.
    assert time.monotonic() - began < 0.4
    shown.read(0.05)
    lines = shown.screen.lines
    assert len(lines) == (1 if columns < 48 else 2), lines
    assert all(len(line) < columns for line in lines)
    assert "33%" in lines[-1]


def test_a_narrow_terminal_gets_one_line(terminal, service):
    shown = terminal(30)
    shown.until(lambda lines: lines == ["loading target 33% 9 min"])


def test_without_colour(terminal, service):
    coloured, plain = terminal(80), terminal(80, NO_COLOR="1")
    for shown in (coloured, plain):
        shown.until(loading)
    assert "\x1b[1m" in coloured.raw
    assert "m" not in {letter for _, letter in re.findall(r"\x1b\[([0-9;]*)([A-Za-z])", plain.raw)}


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_cannot_redraw_gets_lines(terminal, service, term):
    shown = terminal(80, TERM=term)
    shown.until(lambda lines: len(lines) == 2)
    service(phase="ready")
    assert shown.end()[0] == 0
    assert "\x1b" not in shown.raw
    assert [line.partition(":")[0] for line in shown.raw.splitlines()] == ["[ 0", "http"]


def test_a_terminal_without_blocks_gets_ascii(terminal, service):
    shown = terminal(80, PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="POSIX")
    shown.until(loading)
    assert "#---" in shown.screen.lines[1]


def test_ctrl_c_leaves_a_clean_line(terminal, service):
    shown = terminal(80)
    shown.until(loading)
    os.write(shown.master, b"\x03")
    assert shown.end() == (130, "")
    assert shown.screen.lines == ["no longer waiting; the service goes on by itself", ""]


def test_the_diagnosis_stands_below_the_reason(terminal, service, diagnosis):
    shown = terminal(80)
    shown.until(loading)
    service(phase="failed", failures=1, reason="died", diagnosis=diagnosis)
    began = time.monotonic()
    assert shown.end()[0] == 1
    assert time.monotonic() - began < 1.0
    lines = shown.screen.lines
    assert lines[0].endswith(": failed: died")
    assert lines[2:-1] == diagnosis["text"].splitlines()


def test_json_goes_to_stdout_while_the_bar_is_drawn(terminal, service):
    shown = terminal(80, "--json")
    shown.until(loading)
    service(phase="held", reason="no key")
    code, out = shown.end()
    assert (code, json.loads(out)["line"]) == (1, "held: no key")


def test_a_signal_that_ends_it_is_not_held_back(terminal, service):
    shown = terminal(80)
    shown.until(loading)
    shown.process.send_signal(signal.SIGTERM)
    assert shown.end()[0] == -signal.SIGTERM
