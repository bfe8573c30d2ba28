"""The commands and nothing else; each imports what it needs, so that the health probe starts fast."""

import argparse
import math
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import aerie

STATUS_PORT = 8001
_STATUS_URL = f"http://127.0.0.1:{STATUS_PORT}"
_API_URL = "http://127.0.0.1:8000"
_KEYS_FILE = Path("/etc/aerie/secrets/api-keys")
_STATE_DIR = Path("/var/lib/aerie")
_CACHE_DIR = Path("/var/cache/aerie")
_INTERRUPTED = 130
_USAGE = 2  # argparse's own
_TAKE_ENGINE_ARGUMENTS = ("serve", "rehearse")
_ALIKE = 0.75  # of 1; what is less like an option was not meant for it, such as vLLM's --port for --status-port


class _Parser(argparse.ArgumentParser):
    """Takes whole options alone, and says of others what the very command takes that they were given to."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **{"allow_abbrev": False, **named})

    # A command's parser is asked by that of `aerie` for what it knows, which would then complain of the rest itself.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return options, unknown

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        own = [name for name in self._option_string_actions if name.startswith("--")]
        meant = dict.fromkeys(filter(None, (_meant(word, own) for word in unknown)))
        hint = "; what is vLLM's goes after `--`" if self.prog.split()[-1] in _TAKE_ENGINE_ARGUMENTS else ""
        hint += f"; did you mean {' and '.join(meant)}?" if meant else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def _meant(word: str, options: Sequence[str]) -> str | None:
    """Return the option that a word may have been meant for."""
    from difflib import get_close_matches

    if not word.startswith("--"):
        return None
    name = word.partition("=")[0]
    longer = [option for option in options if option.startswith(name)]
    return longer[0] if len(longer) == 1 else next(iter(get_close_matches(name, options, 1, _ALIKE)), None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; argparse exits with 2 by itself."""
    given = list(sys.argv[1:] if argv is None else argv)
    # What follows `--` is vLLM's and must not meet this parser, which would take its --help for our own.
    own, engine = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = _parser(with_model="model" in own)
    options = parser.parse_args(own)
    if engine and options.command not in _TAKE_ENGINE_ARGUMENTS:
        parser.error(
            f"only {' and '.join(f'`aerie {name}`' for name in _TAKE_ENGINE_ARGUMENTS)} take arguments after `--`"
        )
    options.engine_arguments = engine
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parser(*, with_model: bool = True) -> argparse.ArgumentParser:
    parser = _Parser(prog="aerie", description=aerie.__doc__)
    parser.add_argument("--version", action="version", version=f"aerie {aerie.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    _add_serve(commands)

    retry = commands.add_parser(
        "retry",
        help="ask the service in this container to start the engine now, after a hold or a pause",
        description="Asks `aerie serve` in this container for its next start, now that what held it is mended. Keys "
        "and models are looked at anew; a changed configuration or environment needs a new container.",
        epilog="Exit codes: 0 asked, 1 where nothing waits for a start.",
    )
    retry.add_argument(
        "--state-dir", type=Path, default=_STATE_DIR, metavar="DIR", help=_default("where the service keeps its state")
    )
    retry.set_defaults(run=_retry)

    wait = commands.add_parser(
        "wait",
        help="wait until a service is ready",
        description="Shows on stderr how far a start is, as a bar on a terminal and as one line a change "
        "elsewhere, and ends when the service is ready or can no longer become so.",
        epilog="Exit codes: 0 ready, 1 failed, 2 wrong usage, 3 nothing moved, 4 nothing answered, 130 interrupted; "
        "5 a piece that came to no verdict.",
    )
    _add_status_url(wait)
    wait.add_argument(
        "--stall-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help=_default("seconds in which the status stood still; a start that stalls is the supervisor's to give up"),
    )
    wait.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object on stdout at the end: verdict, line, message, seconds, status",
    )
    pieces = wait.add_argument_group("in pieces, for a caller whose connection may break")
    pieces.add_argument(
        "--piece",
        type=float,
        metavar="S",
        help="wait S seconds, or until there is something to tell; print only the JSON, with news and memory",
    )
    pieces.add_argument("--memory", type=_memory, metavar="TEXT", help="of the piece before this one")
    wait.set_defaults(run=_wait)

    probe = commands.add_parser(
        "probe",
        help="exit 0 where the service is ready, 1 where not (the health check)",
        description="Prints in one line whether the service is ready: a request for a completion would be served now.",
        epilog="Exit codes: 0 ready, 1 not ready or nothing answered.",
    )
    _add_status_url(probe)
    probe.set_defaults(run=_probe)

    status = commands.add_parser(
        "status",
        help="show a service's state",
        description="Shows once what a service does: how far a start is, what it serves, or why it failed and what to "
        "do. Asks for no key.",
        epilog="Exit codes: 0 ready, 1 not ready, 4 nothing answered.",
    )
    _add_status_url(status)
    status.add_argument("--json", action="store_true", help="print it as JSON")
    status.set_defaults(run=_status)

    ask = commands.add_parser(
        "ask",
        help="send one chat completion and show what speculation did for it",
        description="Sends one chat completion to the API and prints the answer and how many of "
        "the drafter's tokens the target accepted.",
        epilog="Exit codes: 0 answered, 1 not.",
    )
    ask.add_argument("prompt", metavar="PROMPT", help="what to ask, as the user's message")
    ask.add_argument("--url", type=_base_url, default=_API_URL, help=_default("of the API"))
    ask.add_argument(
        "--api-keys-file", type=Path, default=_KEYS_FILE, metavar="FILE", help=_default("its first key is sent")
    )
    ask.add_argument("--max-tokens", type=int, default=64, metavar="N", help=_default("longest answer"))
    ask.add_argument("--json", action="store_true", help="print it as JSON")
    ask.set_defaults(run=_ask)

    diagnose = commands.add_parser(
        "diagnose",
        help="say why an engine failed, from its log",
        description="Reads a log of `vllm serve`, as printed or as compose, journald, kubectl or a paste carry it, and "
        "says what broke first and what to do. Of several starts in it, the last one that failed is told. The log of "
        "Aerie's container tells what its supervisor knew; lines of the kernel in a log count, too.",
        epilog="Exit codes: 0 a known cause, 1 one that is not known, 2 wrong usage, no log, or nothing of vLLM's in "
        "it, 3 no failure in it, or none as far as the log goes.",
    )
    diagnose.add_argument("log", metavar="FILE", help="the log, or - for standard input")
    diagnose.add_argument("--json", action="store_true", help="print it as JSON")
    diagnose.set_defaults(run=_diagnose)

    _add_rehearse(commands)
    _add_fabric(commands)

    _add_model(commands, is_asked=with_model)

    patches = commands.add_parser(
        "patches",
        help="print the series of patches in this image's vLLM",
        description="Prints which patches the vLLM of this image carries, and what each of them is for.",
        epilog="Exit codes: 0 printed, 1 none is recorded here.",
    )
    patches.add_argument("--json", action="store_true", help="print it as JSON, with every field of the headers")
    patches.set_defaults(run=_patches)
    return parser


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="run vLLM under supervision (the container's entry point)",
        usage="aerie serve [options] -- <arguments of vllm serve>",
        description="Runs `vllm serve` as a child, says why it died, restarts it with back-off, and serves its state "
        "on the status port. What another start cannot cure is held until `aerie retry`.",
        epilog="Exit codes: 0 after a stop, 1 where no status can be served; with --once also 2 wrong configuration, "
        "3 out of memory, 4 hardware or driver, 5 engine crash, 6 hung or stalled, 128+n killed by signal n.",
    )
    serve.add_argument("--once", action="store_true", help="end with the engine instead of starting it again")
    serve.add_argument(
        "--state-dir",
        type=Path,
        default=_STATE_DIR,
        metavar="DIR",
        help=_default("for state.json and the crash reports"),
    )
    serve.add_argument(
        "--cache-dir",
        type=Path,
        default=_CACHE_DIR,
        metavar="DIR",
        help=_default("for starts.json, how long earlier starts took"),
    )
    serve.add_argument("--status-host", default="0.0.0.0", metavar="HOST", help=_default("to serve the status on"))  # noqa: S104 - in a container; compose publishes it on loopback
    serve.add_argument(
        "--status-port", type=_port, default=STATUS_PORT, metavar="PORT", help=_default("to serve the status on")
    )
    serve.add_argument(
        "--api-keys-file", type=Path, default=_KEYS_FILE, metavar="FILE", help=_default("one key a line")
    )
    serve.add_argument(
        "--drain-timeout",
        type=_whole_seconds,
        default=90,
        metavar="S",
        help=_default("seconds that running requests get after a stop was asked for; vLLM's --shutdown-timeout"),
    )
    serve.add_argument(
        "--stall-timeout",
        type=float,
        default=900.0,  # NCCL ends a hung collective itself after 600 s, and says which
        metavar="S",
        help=_default("seconds in which nothing moves, then a start is given up and tried again"),
    )
    serve.add_argument(
        "--warm",
        choices=("auto", "never"),
        default="auto",
        help=_default("read the weights into the page cache beside a start, where memory allows"),
    )
    serve.set_defaults(run=_serve)


def _add_model(commands: Any, *, is_asked: bool) -> None:
    model = commands.add_parser("model", help="fetch, prove, list and free weights; make a tiny model")
    kinds = model.add_subparsers(dest="kind", required=True, metavar="KIND")
    if is_asked:  # the health probe loads no module that it does not need
        from aerie.cache.arguments import add_commands

        add_commands(kinds)
    tiny = kinds.add_parser(
        "tiny",
        help="write a tiny Kimi-K2.5 and two EAGLE-3 drafters for it",
        description="Writes checkpoints of the real architecture with random weights, which load and answer within "
        "seconds on a CPU: for trying out a deployment and for tests.",
        epilog="Exit codes: 0 written or there already, 1 not written.",
    )
    tiny.add_argument(
        "--out", type=_path, required=True, metavar="DIR", help="where to; there must be nothing else in it"
    )
    tiny.add_argument("--seed", type=int, default=0, help=_default("of the weights"))
    tiny.set_defaults(run=_model_tiny)


def _add_rehearse(commands: Any) -> None:
    rehearse = commands.add_parser(
        "rehearse",
        help="go through the whole start-up in a minute, with a shrunken copy of the pair",
        usage="aerie rehearse [options] -- <arguments of vllm serve>",
        description="Checks configuration, checkpoints and memory without reading a weight, then starts the engine "
        "with the same arguments and a shrunken copy of target and drafter, asks it what the service will be asked, "
        "and stops it. What would fail after the long load fails here. See docs/rehearsal.md.",
        epilog="Exit codes: 0 passed, maybe with warnings; 1 failed; 2 wrong usage; 130 interrupted, 143 by SIGTERM.",
    )
    rehearse.add_argument(
        "--target", type=Path, metavar="DIR", help="the target's checkpoint (default: the arguments' model)"
    )
    rehearse.add_argument(
        "--drafter",
        type=Path,
        metavar="DIR",
        help="the drafter's (default: the one of the arguments' speculative-config)",
    )
    rehearse.add_argument("--config", metavar="FILE", help="the engine's configuration, as `-- --config FILE`")
    extent = rehearse.add_argument_group("how much of it")
    extent.add_argument("--static", action="store_true", help="start no engine: seconds, and no GPU is touched")
    extent.add_argument(
        "--without-weights", action="store_true", help="the checkpoints have no weights here: do not look for them"
    )
    extent.add_argument(
        "--beside",
        action="store_true",
        help="a service runs on these GPUs: take at most 8 GiB of each, at the lowest priority",
    )
    extent.add_argument(
        "--if-changed", action="store_true", help="do nothing where the same has passed before (kept in --cache-dir)"
    )
    extent.add_argument(
        "--accept",
        action="append",
        default=[],
        metavar="CHECK",
        help="let this check, named as in the report, fail with a warning; may be given more than once",
    )
    extent.add_argument(
        "--chip",
        metavar="NAME",
        help="plan for the GPU that stands for this chip, sm_120 (RTX PRO 6000 Blackwell) or sm_90 (H200), instead of "
        "this machine's; the engine runs on what is here",
    )
    extent.add_argument("--gpus", type=_count, metavar="N", help="with --chip: how many of it (default: 8)")
    output = rehearse.add_argument_group("what is left of it")
    output.add_argument(
        "--json", metavar="FILE", help="write the report as JSON; - for stdout, the text then goes to stderr"
    )
    output.add_argument("--junit", type=Path, metavar="FILE", help="write the report as JUnit's XML")
    output.add_argument("--work-dir", type=Path, metavar="DIR", help="keep the shrunken pair and the engine's log here")
    output.add_argument(
        "--cache-dir",
        type=Path,
        default=_CACHE_DIR,
        metavar="DIR",
        help=_default("for what passed, and the shrunken pair"),
    )
    rehearse.set_defaults(run=_rehearse)


def _add_fabric(commands: Any) -> None:
    fabric = commands.add_parser(
        "fabric",
        help="prove that traffic between the GPUs arrives, and say what serving without it costs",
        description="Moves bytes between every pair of GPUs and looks whether they came, then reduces over all of them "
        "by NCCL, with the environment that it finds. What hangs is killed and named. Nothing is tried while somebody "
        "uses the GPUs.",
        epilog="Exit codes: 0 works; 1 dead or failed; 2 wrong usage; 3 nothing was tried, for fewer than two GPUs or "
        "GPUs in use; 130 interrupted, 143 by SIGTERM.",
    )
    fabric.add_argument(
        "--deadline",
        type=_seconds,
        default=60.0,
        metavar="S",
        help=_default("seconds in which nothing moves, then a copy or a rank counts as hung"),
    )
    fabric.add_argument(
        "--compare",
        action="store_true",
        help="reduce without peer traffic, too, where it works: what it is worth (always done where it is dead)",
    )
    fabric.add_argument(
        "--backend",
        choices=("nccl", "gloo"),
        default="nccl",
        help=_default("gloo reduces on a CPU, and proves nothing about GPUs"),
    )
    fabric.add_argument("--ranks", type=_count, metavar="N", help="processes of gloo (default: 2)")
    fabric.add_argument(
        "--json", metavar="FILE", help="write the report as JSON; - for stdout, the text then to stderr"
    )
    fabric.set_defaults(run=_fabric)
    more = fabric.add_subparsers(metavar="numa", help="may memory be bound to a NUMA node here, as numa-bind does it")
    numa = more.add_parser(
        "numa",
        help="may memory be bound to a NUMA node here, as numa-bind does it",
        description="Binds memory to each NUMA node that this container may use, and looks where its pages lie. In a "
        "container that takes the capability SYS_NICE.",
        epilog="Exit codes: 0 works, 1 not.",
    )
    numa.add_argument("--json", action="store_true", dest="as_json", help="print it as JSON")
    numa.set_defaults(run=_fabric_numa)


def _default(text: str) -> str:
    return f"{text} (default: %(default)s)"


def _whole_seconds(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of seconds, which vLLM wants")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def _path(text: str) -> Path:
    from aerie.cache.arguments import some_path

    return some_path(text)


def _port(text: str) -> int:
    from aerie.port import port_from

    try:
        return port_from(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is none: {error}") from None


def _base_url(text: str) -> str:
    refusal = argparse.ArgumentTypeError(f"{text!r} is no URL such as {_STATUS_URL}")
    try:
        parts = urlsplit(text)
        complete = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError:  # a port that is no number, a host's name that cannot be one
        raise refusal from None
    if not complete:
        raise refusal
    return text.rstrip("/")


def _memory(text: str) -> object:
    from aerie.gate.judge import Memory

    try:
        return Memory.from_text(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_status_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url", nargs="?", type=_base_url, default=_STATUS_URL, metavar="URL", help=_default("of the status port")
    )


def _serve(options: argparse.Namespace) -> int:
    # Process 1 without a handler never gets a SIGTERM; hold it back until the service, after its imports, has one.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    from aerie.supervisor.service import Options, serve

    return serve(
        Options(
            engine_arguments=options.engine_arguments,
            once=options.once,
            state_dir=options.state_dir,
            cache_dir=options.cache_dir,
            status_host=options.status_host,
            status_port=options.status_port,
            keys_file=options.api_keys_file,
            drain_timeout=options.drain_timeout,
            stall_timeout=options.stall_timeout,
            warm=options.warm != "never",
        )
    )


def _retry(options: argparse.Namespace) -> int:
    from aerie.supervisor.retry import retry

    return retry(options.state_dir)


def _wait(options: argparse.Namespace) -> int:
    from aerie.gate.wait import wait, wait_a_piece

    if options.piece is None:
        return wait(options.url, options.stall_timeout, as_json=options.json)
    return wait_a_piece(options.url, options.stall_timeout, options.piece, options.memory)


def _probe(options: argparse.Namespace) -> int:
    from aerie.gate.probe import probe

    return probe(options.url)


def _status(options: argparse.Namespace) -> int:
    from aerie.gate.report import status

    return status(options.url, as_json=options.json)


def _ask(options: argparse.Namespace) -> int:
    from aerie.gate.ask import ask

    return ask(options.url, options.api_keys_file, options.prompt, options.max_tokens, as_json=options.json)


def _diagnose(options: argparse.Namespace) -> int:
    from aerie.diagnosis.command import diagnose

    return diagnose(options.log, as_json=options.json)


def _rehearse(options: argparse.Namespace) -> int:
    from aerie.rehearsal.command import Options, UsageError, rehearse

    config = [] if options.config is None else ["--config", options.config]
    try:
        return rehearse(
            Options(
                words=(*config, *options.engine_arguments),
                target=options.target,
                drafter=options.drafter,
                static=options.static,
                weights=not options.without_weights,
                chip=options.chip,
                count=options.gpus,
                beside=options.beside,
                if_changed=options.if_changed,
                accept=tuple(options.accept),
                work_dir=options.work_dir,
                cache_dir=options.cache_dir,
                json=options.json,
                junit=options.junit,
            )
        )
    except UsageError as error:
        print(f"aerie rehearse: {error}", file=sys.stderr)
        return _USAGE


def _fabric(options: argparse.Namespace) -> int:
    from aerie.fabric.command import Options, UsageError, fabric

    try:
        return fabric(
            Options(
                deadline=options.deadline,
                compare=options.compare,
                backend=options.backend,
                ranks=options.ranks,
                json=options.json,
            )
        )
    except UsageError as error:
        print(f"aerie fabric: {error}", file=sys.stderr)
        return _USAGE


def _fabric_numa(options: argparse.Namespace) -> int:
    from aerie.fabric.numa import numa

    return numa(as_json=options.as_json)


def _model_tiny(options: argparse.Namespace) -> int:
    from aerie.checkpoint.tiny import DirectoryTakenError, write_tiny

    try:
        written = write_tiny(options.out, options.seed)
    except (DirectoryTakenError, ImportError, OSError) as error:
        print(f"aerie: the tiny pair was not written: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: {'written' if written else 'there already, nothing changed'}")
    return 0


def _patches(options: argparse.Namespace) -> int:
    from aerie.patches import report

    return report(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
