"""What `aerie model ...` takes. Imports nothing that costs time: a command's own module is loaded when it runs.

The command X is the function X of the module `aerie.cache.X`, called with that module's `Options`, a dataclass whose
fields are named as the arguments here.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

_MODELS = Path("/data/models")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_RATE = re.compile(r"(\d+(?:\.\d+)?) ?([KMG]I?|)B?(?:/S)?", re.IGNORECASE)
_FAILED, _USAGE = 1, 2
_MOST_CONNECTIONS = 256
_SOURCE = (
    "SOURCE is hf:OWNER/NAME or OWNER/NAME on the Hub, s3://BUCKET/PREFIX, the path of a directory, "
    "rsync://HOST/MODULE/PATH, or [USER@]HOST:PATH for rsync by ssh."
)


def add_commands(commands: Any) -> None:
    """Add all commands to the subparsers of `aerie model`."""
    for add in (_add_fetch, _add_adopt, _add_verify, _add_list, _add_rollback, _add_prune, _add_warm, _add_loader):
        add(commands)


def _run(name: str) -> Callable[[argparse.Namespace], int]:
    def run(given: argparse.Namespace) -> int:
        from aerie.cache.directories import StoreError
        from aerie.cache.names import NameRefusedError
        from aerie.cache.sources.opening import SourceTextError
        from aerie.cache.words import printable

        module = import_module(f"aerie.cache.{name}")
        options = module.Options(**{field: getattr(given, field) for field in module.Options.__dataclass_fields__})
        try:
            return int(getattr(module, name)(options))
        except SourceTextError as error:
            message, code = str(error), _USAGE  # of several lines, and without what a terminal would obey
        except NameRefusedError as error:
            message, code = printable(str(error)), _USAGE
        except StoreError as error:
            message, code = printable(str(error)), _FAILED
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            message, code = printable(f"{where}{error.strerror or error}"), _FAILED
        print(f"aerie model {given.kind}: {message}", file=sys.stderr)
        if given.json:
            try:
                print(json.dumps({"state": "failed", "message": message}), flush=True)
            except OSError:  # stdout is what failed, and Python would try once more at its end
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code

    return run


def _add(commands: Any, module: str, name: str, **described: str) -> Any:
    parser = commands.add_parser(name, **described)
    parser.set_defaults(run=_run(module))
    return parser


def _add_models_dir(parser: Any) -> None:
    parser.add_argument(
        "--models-dir",
        type=some_path,
        default=_MODELS,
        metavar="DIR",
        help="where models are kept (default: %(default)s)",
    )


def _add_json(parser: Any) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_as_it_is(parser: Any) -> None:
    parser.add_argument(
        "--as-it-is",
        action="store_true",
        help="publish it also where the headers of its weights show that a file is cut off or missing, and nothing "
        "proves that it is to be so",
    )


def _add_reach(parser: Any) -> None:
    parser.add_argument(
        "--endpoint",
        type=some_text,
        metavar="URL",
        help="of a mirror of the Hub or of an S3-compatible store, instead of their own",
    )
    parser.add_argument(
        "--token-file",
        type=some_path,
        metavar="FILE",
        help="with the Hub's token (default: HF_TOKEN, then where `hf auth login` keeps it)",
    )
    parser.add_argument(
        "--limit-rate", type=rate, metavar="RATE", help="fetch no more than that a second, such as 200MB (default: all)"
    )


def _add_fetch(commands: Any) -> None:
    fetch = _add(
        commands,
        "fetch",
        "fetch",
        help="fetch a model, prove it and publish it whole",
        description=f"{_SOURCE} Fetches what is missing, proves every byte, and lets the revision appear whole in the "
        "models directory. What was fetched before a crash, a kill or a cut is not fetched again.",
        epilog="Exit codes: 0 whole and published, also where it was there already; 1 not, and what was fetched is "
        "kept for the next run; 2 wrong usage; 130 interrupted, 143 by SIGTERM, 129 by SIGHUP.",
    )
    fetch.add_argument("source", type=some_text, metavar="SOURCE", help="where from")
    fetch.add_argument(
        "--name", type=some_text, metavar="NAME", help="the model's here (default: the last part of SOURCE)"
    )
    fetch.add_argument(
        "--revision", type=some_text, metavar="REVISION", help="a commit, branch or tag on the Hub (default: main)"
    )
    _add_models_dir(fetch)
    _add_reach(fetch)
    fetch.add_argument(
        "--transport", choices=("auto", "https", "xet"), default="auto", help="to the Hub (default: %(default)s)"
    )
    fetch.add_argument(
        "--connections",
        type=_connections,
        default=8,
        metavar="N",
        help=f"at once to the source, {_MOST_CONNECTIONS} at most (default: %(default)s)",
    )
    fetch.add_argument(
        "--include",
        type=some_text,
        action="append",
        default=[],
        metavar="GLOB",
        help="only these files; may be given more than once",
    )
    fetch.add_argument(
        "--exclude",
        type=some_text,
        action="append",
        default=[],
        metavar="GLOB",
        help="not these files; may be given more than once",
    )
    fetch.add_argument("--offline", action="store_true", help="open no connection: is it published here already?")
    fetch.add_argument("--wait", action="store_true", help="wait where another process works on this model")
    fetch.add_argument("--no-switch", action="store_false", dest="switch", help="publish, but leave `current` alone")
    _add_as_it_is(fetch)
    fetch.add_argument("--dry-run", action="store_true", help="say what would be fetched, and fetch nothing")
    _add_json(fetch)


def _add_adopt(commands: Any) -> None:
    adopt = _add(
        commands,
        "adopt",
        "adopt",
        help="take weights that are on this host already into the models directory",
        description="Hashes every file of DIR once and moves it to its place by renaming, or with --reflink by sharing "
        "its blocks; no byte is copied. What was moved is gone from DIR, and so is DIR where nothing else is in it. "
        "DIR may be a model's directory in the models directory, a snapshot of huggingface_hub's cache (whose names "
        "stay), or any directory of the same file system. What has it open keeps it open.",
        epilog="Exit codes: 0 published, also where its files are published already; 1 not, and DIR is as it was or "
        "the same command goes on; 2 wrong usage; 130 interrupted, 143 by SIGTERM.",
    )
    adopt.add_argument("directory", type=some_path, metavar="DIR", help="with the files of one model")
    adopt.add_argument("--name", type=some_text, metavar="NAME", help="the model's here (default: DIR's own)")
    adopt.add_argument(
        "--revision",
        type=some_text,
        metavar="REVISION",
        help="the commit that it is, 40 hexadecimal digits (default: by its content)",
    )
    adopt.add_argument(
        "--source",
        type=some_text,
        metavar="SOURCE",
        help="where the same files are: compared with it, and --repair goes there",
    )
    _add_models_dir(adopt)
    adopt.add_argument(
        "--endpoint",
        type=some_text,
        metavar="URL",
        help="of a mirror of the Hub or of an S3-compatible store, for --source",
    )
    adopt.add_argument("--token-file", type=some_path, metavar="FILE", help="with the Hub's token, for --source")
    how = adopt.add_mutually_exclusive_group()
    how.add_argument("--reflink", action="store_true", help="leave DIR as it is, and share its blocks (XFS, Btrfs)")
    how.add_argument("--copy", action="store_true", help="leave DIR as it is, and copy: from another file system")
    adopt.add_argument("--no-switch", action="store_false", dest="switch", help="publish, but leave `current` alone")
    _add_as_it_is(adopt)
    _add_json(adopt)


def _add_verify(commands: Any) -> None:
    verify = _add(
        commands,
        "verify",
        "verify",
        help="prove that published models are whole, and mend what is not",
        description="Reads every byte of what is published, on all cores, and compares it with what was fetched. "
        "NAME is a model's current revision, NAME@REVISION any of its revisions.",
        epilog="Exit codes: 0 whole, or repaired; 1 damaged or missing; 2 wrong usage; 130 interrupted, "
        "143 by SIGTERM.",
    )
    verify.add_argument(
        "models",
        type=some_text,
        nargs="*",
        metavar="NAME[@REVISION]",
        help="which (default: the current revision of every model)",
    )
    verify.add_argument("--all", action="store_true", help="every revision of these models")
    _add_models_dir(verify)
    verify.add_argument(
        "--quick",
        action="store_true",
        help="seconds instead of minutes: sizes, modes, the headers of safetensors files, the index, and a sample of "
        "the content, another one each time",
    )
    verify.add_argument(
        "--repair", action="store_true", help="fetch what is wrong, and no more, from where the model came from"
    )
    verify.add_argument(
        "--source",
        type=_source,
        metavar="SOURCE",
        help="to repair from, as `fetch` takes it, instead of where the model came from",
    )
    _add_reach(verify)
    verify.add_argument("--threads", type=count, metavar="N", help="that read and hash (default: twice the cores)")
    _add_json(verify)


def _add_list(commands: Any) -> None:
    listing = _add(
        commands,
        "listing",
        "list",
        help="show what is published, in service and being fetched",
        description="Shows every model's revisions: which one is current and which was before, their sizes, where they "
        "came from, whether somebody uses them, and what is half fetched.",
        epilog="Exit codes: 0 shown, 1 where the models directory or the state of a model cannot be read, or what is "
        "in service is gone.",
    )
    _add_models_dir(listing)
    _add_json(listing)


def _add_rollback(commands: Any) -> None:
    rollback = _add(
        commands,
        "rollback",
        "rollback",
        help="switch a model back to the revision before",
        description="Looks whether the revision is there and whole, as `verify --quick` does, then lets `current` "
        "be it. A second rollback goes back again. What runs keeps what it has open, and starts next with the other.",
        epilog="Exit codes: 0 switched, 1 not, 2 wrong usage.",
    )
    rollback.add_argument("model", type=_model_alone, metavar="NAME", help="of the model")
    rollback.add_argument(
        "revision", type=some_text, nargs="?", metavar="REVISION", help="to which one (default: the one before)"
    )
    _add_models_dir(rollback)
    _add_json(rollback)


def _add_prune(commands: Any) -> None:
    prune = _add(
        commands,
        "prune",
        "prune",
        help="free the space of old revisions",
        description="Removes revisions, but never the current one, the one before it, the newest further ones "
        "as --keep says, what somebody uses, what can be fetched from nowhere, nor what has no manifest of Aerie's.",
        epilog="Exit codes: 0 done, also where there was nothing to free; 1 not all of it; 2 wrong usage.",
    )
    prune.add_argument("models", type=some_text, nargs="*", metavar="NAME", help="of which models (default: of all)")
    _add_models_dir(prune)
    prune.add_argument(
        "--keep",
        type=_whole,
        default=0,
        metavar="N",
        help="further revisions to keep, the newest (default: none)",
    )
    prune.add_argument(
        "--adopted", action="store_true", help="remove old revisions, too, that were adopted and have no source"
    )
    prune.add_argument(
        "--staging",
        type=_days,
        metavar="DAYS",
        help="remove what was half fetched and not touched for so many days, too (default: only what is published "
        "by now)",
    )
    prune.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")
    _add_json(prune)


def _add_warm(commands: Any) -> None:
    warm = _add(
        commands,
        "warm",
        "warm",
        help="read weights into the page cache",
        description="Reads the safetensors files of the directories into the host's page cache, in parallel, as far "
        "as memory allows.",
        epilog="Exit codes: 0 done, 1 not, 2 wrong usage, 130 interrupted, 143 by SIGTERM.",
    )
    warm.add_argument(
        "directories",
        nargs="+",
        type=some_path,
        metavar="DIR",
        help="with weights, or a model's in the models directory, of which `current` is read; the most important first",
    )
    _add_json(warm)


def _add_loader(commands: Any) -> None:
    loader = _add(
        commands,
        "loader",
        "loader",
        help="say which of vLLM's loaders reads a model best on this host, and why",
        description="Looks at the model's files, memory, file system and GPUs as they are seen here, and at which "
        "loaders this image has. Role vllm writes what it says into serve.yaml.",
        epilog="Exit codes: 0 said, 1 not, 2 wrong usage.",
    )
    loader.add_argument(
        "--config",
        type=some_text,
        default="/etc/aerie/serve.yaml",
        metavar="FILE",
        help="the engine's configuration, - for standard input (default: %(default)s)",
    )
    loader.add_argument(
        "--loader",
        choices=("auto", "default", "fastsafetensors", "instanttensor", "runai_streamer"),
        default="auto",
        help="the one to use (default: %(default)s)",
    )
    _add_json(loader)


def some_text(given: str) -> str:
    """Return a text that is not empty, as argparse's type: a script's variable that is not set is no choice."""
    if not given.strip():
        raise argparse.ArgumentTypeError("an empty text was given: is a variable not set?")
    return given


def some_path(given: str) -> Path:
    """Return a path that is not empty, as argparse's type: an empty one would be the directory one stands in."""
    return Path(some_text(given))


def _source(text: str) -> str:
    from aerie.cache.sources.opening import SourceTextError, parse

    try:
        parse(some_text(text))
    except SourceTextError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _model_alone(text: str) -> str:
    name, at, revision = some_text(text).partition("@")
    if at:
        raise argparse.ArgumentTypeError(f"{text!r} has a revision, which is an argument of its own: {name} {revision}")
    return name


def count(text: str) -> int:
    """Return a whole number above 0, as argparse's type."""
    if not (text.isascii() and text.isdecimal()) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def _connections(text: str) -> int:
    if (number := count(text)) > _MOST_CONNECTIONS:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {_MOST_CONNECTIONS}")
    return number


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not 0 <= days < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of days")
    return days


def rate(text: str) -> int:
    """Return bytes a second from `200MB`, `1.5GiB` or a plain number, as argparse's type."""
    found = _RATE.fullmatch(text.strip())
    bytes_ = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if bytes_ == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate such as 200MB, which are bytes a second")
    return bytes_
