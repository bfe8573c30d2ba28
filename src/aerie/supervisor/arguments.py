"""What the supervisor needs of `vllm serve`'s arguments: where the engine will listen and what it will serve."""

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.auth import read_keys
from aerie.cache.layout import CURRENT
from aerie.engine_arguments import ConfigurationError, read_arguments, read_command_line, spelled
from aerie.port import port_from

_DEFAULT_PORT = 8000  # vLLM's
_EVERYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - what vLLM listens on, not we

_HOST_NAME = re.compile(r"([A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?")
_REFUSED = {
    "api-key": "keys belong into the key file, one a line: an argument shows in ps and docker inspect",
    "grpc": "the gRPC server asks for no key",
    "grpc-port": "the gRPC server asks for no key",
    "uds": "readiness is checked over TCP; use --host and --port",
    "headless": "a node without an API server can never become ready",
    "enable-sleep-mode": "an engine that sleeps answers nothing, looks like one that hangs, and is ended as one",
    "disable-log-stats": "without the engine's statistics a hung engine cannot be told from a busy one",
}
_WITHOUT_VALUE = "hf-token"  # without a value it means the file where the Hub's own tools keep it
_WHY_WITHOUT = "a token shows in ps and docker inspect: name a file that holds it in the variable HF_TOKEN_PATH"
_REFUSED_VARIABLES = {
    "VLLM_API_KEY": "keys belong into the key file, one a line: a variable shows in docker inspect",
    "VLLM_SERVER_DEV_MODE": "its routes pause an engine or put it to sleep, which then looks like one that hangs",
    "VLLM_USE_RUST_FRONTEND": "vLLM's Rust front end does not load the middleware that asks for the key",
}


@dataclass(frozen=True)
class EngineArguments:
    """What the engine was told: its address as seen from here, and the models it loads and offers.

    `step_tokens` is the number of tokens one step may process, None where vLLM chooses it.
    """

    url: str
    port: int
    model: str
    served_name: str
    drafter: str | None
    shutdown_timeout: Any
    """What `--shutdown-timeout` was given, as it was written; None where it was not."""
    step_tokens: int | None = None


def read(arguments: Sequence[str], environment: Mapping[str, str]) -> EngineArguments:
    """Read `vllm serve`'s arguments, with its own precedence: command line, then `--config`, then defaults.

    Raises ConfigurationError for what the supervisor refuses, or cannot find or read.
    """
    for variable, why in _REFUSED_VARIABLES.items():
        if environment.get(variable, "0") not in {"", "0"}:
            raise ConfigurationError(f"environment variable {variable} is refused: {why}")
    settings = {option: value for option, value in read_arguments(arguments).items() if value is not False}
    for option, why in _REFUSED.items():
        if given := spelled(option, settings):
            raise ConfigurationError(f"engine argument --{given} is refused: {why}")
    on_command_line = read_command_line(arguments)
    if (given := spelled(_WITHOUT_VALUE, on_command_line)) and on_command_line[given]:
        raise ConfigurationError(f"engine argument --{given} is refused with a value: {_WHY_WITHOUT}")
    model = _text(settings.get("model"))
    if not model:
        raise ConfigurationError("no model was given: name it first after `--`, or as `model:` in the --config file")
    names = settings.get("served-model-name") or model
    return EngineArguments(
        url=_url(settings, port := _port(settings)),
        port=port,
        model=model,
        served_name=_text(names[0] if isinstance(names, list) else names),
        drafter=_drafter(settings.get("speculative-config")) or _text(settings.get("spec-model")) or None,
        shutdown_timeout=settings.get("shutdown-timeout"),
        step_tokens=_step_tokens(settings.get("max-num-batched-tokens")),
    )


def is_path(name: str) -> bool:
    """Return whether a model is named by a path, and not as a repository of the Hub."""
    return name.startswith(("/", "./", "../"))


def check_paths(arguments: EngineArguments) -> None:
    """Raise ConfigurationError where a model that is named by a path is not there or cannot be read."""
    for role, name in (("model", arguments.model), ("drafter", arguments.drafter)):
        if not name or not is_path(name):
            continue  # a repository's name, which only vLLM can resolve
        path = Path(name)
        try:
            missing = not path.exists()
            empty = path.is_dir() and not any(path.iterdir())
        except OSError as error:
            raise ConfigurationError(
                f"{role} {name} cannot be read: {error.strerror}; it must be readable by this user (uid {os.getuid()})"
            ) from None
        if missing:
            raise ConfigurationError(f"{role} {name} does not exist: {_remedy(path)}")
        if empty:
            raise ConfigurationError(
                f"{role} {name} is an empty directory: put the checkpoint there or correct the mount"
            )


def _remedy(path: Path) -> str:
    """Return what to do about a path that leads nowhere."""
    if path.name != CURRENT:
        return "check the path and the mount of the models' directory"
    if (path.parent / "config.json").is_file():
        return (
            f"{path.parent} is a checkpoint without revisions: `aerie model adopt {path.parent}` on the host gives it "
            f"one, or name {path.parent} itself"
        )
    if path.is_symlink():
        return f"it leads to {path.readlink()}, which is not there: see `aerie model list`"
    return "publish a revision of it with `aerie model fetch` or `adopt`, or check the mount of the models' directory"


def draining(arguments: EngineArguments, drain_timeout: int) -> list[str]:
    """Return the arguments that let requests finish for `drain_timeout` seconds after a stop was asked for.

    Raises ConfigurationError where another limit was given to vLLM itself.
    """
    given = arguments.shutdown_timeout
    if given is not None and str(given) != str(drain_timeout):
        raise ConfigurationError(
            f"engine argument --shutdown-timeout {given} contradicts the supervisor's --drain-timeout {drain_timeout}: "
            "leave it out, and give the seconds to --drain-timeout"
        )
    return [] if given is not None else ["--shutdown-timeout", str(drain_timeout)]


def check_keys(path: Path) -> None:
    """Raise ConfigurationError where a key file gives no key."""
    remedy = "put a key there, one a line, readable by this user"
    try:
        keys = read_keys(path)
    except FileNotFoundError:
        raise ConfigurationError(f"key file {path} does not exist: {remedy}") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"key file {path} cannot be read ({error}): {remedy}") from None
    if not keys:
        raise ConfigurationError(f"key file {path} holds no key: {remedy}")


def _port(settings: Mapping[str, Any]) -> int:
    port = settings.get("port", _DEFAULT_PORT)
    try:
        return port_from(_text(port))
    except ValueError as error:
        raise ConfigurationError(f"engine argument --port {port!r} is none: {error}") from None


def _url(settings: Mapping[str, Any], port: int) -> str:
    host = _host(settings)
    scheme = "https" if settings.get("ssl-keyfile") and settings.get("ssl-certfile") else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _host(settings: Mapping[str, Any]) -> str:
    given = _text(settings.get("host"))
    host = _EVERYWHERE.get(given, given)
    if not _HOST_NAME.fullmatch(host) and not _is_address(host):
        raise ConfigurationError(f"engine argument --host needs an IP address or a host's name, not {given!r}")
    return host


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _drafter(speculation: Any) -> str | None:
    return _text(speculation.get("model")) or None if isinstance(speculation, dict) else None


def _step_tokens(given: Any) -> int | None:
    text = _text(given)
    # vLLM reads 8k and 8K, too; the model's length is taken instead.
    return int(text) if text.isdecimal() and len(text) <= len(str(2**63)) else None


def _text(value: Any) -> str:
    return "" if value is None else str(value)
