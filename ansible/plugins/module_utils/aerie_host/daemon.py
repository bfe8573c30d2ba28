"""Docker's daemon.json: what is wanted of it, what it takes for a change to count, and what it would leave behind."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

Object = dict[str, Any]

DATA_ROOT = "/var/lib/docker"
"""Where the file names none."""

RELOADABLE = frozenset(
    {
        "authorization-plugins",
        "debug",
        "default-runtime",
        "insecure-registries",
        "labels",
        "live-restore",
        "max-concurrent-downloads",
        "max-concurrent-uploads",
        "max-download-attempts",
        "registry-mirrors",
        "runtimes",
        "shutdown-timeout",
    }
)
"""Settings that dockerd takes over on SIGHUP, by the engine's reference ("Configuration reload behavior"), but for
`features`: it is stored again, and what it switches (CDI, the image store) is set up at the start alone."""

STORES = {"storage-driver": ("storage-driver",), "features": ("features", "containerd-snapshotter")}
"""Settings by which dockerd stores, by the name at the top of the file: each store sees its own images alone."""


def wanted(config: Object, defaults: Object, site: Object) -> Object:
    """Return `config` over those of `defaults` of which the site's own file has nothing; null takes a setting out."""
    taken = set(config) | set(site)
    # The options belong to the driver: to another one they mean nothing, and a container with them does not start.
    driver = config.get("log-driver", site.get("log-driver", defaults.get("log-driver")))
    if driver != defaults.get("log-driver"):
        taken.add("log-opts")
    return _without_null(config) | {name: value for name, value in defaults.items() if name not in taken}


def _without_null(config: Object) -> Object:
    return {
        name: _without_null(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if value is not None
    }


def changed(before: Object, after: Object) -> list[str]:
    """Names of the settings, at the top of the file, that differ."""
    return sorted(
        name for name in before.keys() | after.keys() if before.get(name, _NOTHING) != after.get(name, _NOTHING)
    )


_NOTHING = object()


def need_restart(settings: list[str]) -> list[str]:
    """Those of the settings that dockerd reads at its start alone."""
    return [name for name in settings if name not in RELOADABLE]


def data_in(root: Path) -> list[str]:
    """Return which kinds of things a data root holds: containers, images, volumes."""
    kinds = {
        "containers": root.glob("containers/*"),
        "images": root.glob("image/*/imagedb/content/sha256/*"),
        "volumes": (path for path in root.glob("volumes/*") if path.is_dir()),
    }
    return [kind for kind, found in kinds.items() if next(iter(found), None)]


def left_behind(before: Object, after: Object) -> dict[str, str]:
    """Return, by setting, what to do where the change would leave data behind; nothing where it would not."""
    old, new = (Path(str(content.get("data-root", DATA_ROOT))) for content in (before, after))
    data = " and ".join(data_in(old))
    told = {}
    if data and old != new and not data_in(new):
        told["data-root"] = (
            f"Docker's data root is {old} and has {data}; with data-root {new} they would be out of sight. Data is "
            f"never moved by itself. Either keep {old} (docker_daemon_config: {{data-root: {old}}}), or move it: stop "
            f"what runs (systemctl stop docker.socket docker), copy (rsync -aHAXS --numeric-ids {old}/ {new}/), run "
            f"this again, and remove {old} when everything is there. Nothing was changed"
        )
    for setting, pointer in STORES.items():
        was, becomes = (_at(content, pointer) for content in (before, after))
        if data and was != becomes:
            told[setting] = (
                f"{old} has {data}, and with another {pointer[-1]} ({was}, then {becomes}) the daemon may not see "
                "them; running containers lose their files. Keep it, or stop and remove the containers and save the "
                "images (docker save) before it changes. Nothing was changed"
            )
    return told


def _at(content: Any, pointer: tuple[str, ...]) -> str:
    for key in pointer:
        content = content.get(key) if isinstance(content, dict) else None
    return "unset" if content is None else content if isinstance(content, str) else json.dumps(content)


def start_of(stat: str) -> str:
    """Return the start time of a process by its /proc/PID/stat, which tells it from any later one; only of a dockerd.

    The number in docker.pid outlives a killed daemon, and may then be given to another program.
    """
    name, _, rest = stat.partition(" (")[2].rpartition(") ")
    # The state is the third field.
    return rest.split()[22 - 3] if name == "dockerd" else ""


def flags_of_unit(shown: str, read: Callable[[str], str]) -> list[str]:
    """Return the arguments with which the unit starts dockerd next, from what `systemctl show` says of it.

    `read` returns an environment file's text, empty where there is none. Like systemd: a word that is one variable is
    split at white space, a variable within a word is not.
    """
    values: dict[str, str] = {}
    settings = [line.partition("=")[::2] for line in shown.splitlines()]
    for name, value in settings:
        if name == "Environment":
            values |= dict(one.partition("=")[::2] for one in shlex.split(value))
        if name == "EnvironmentFiles":
            text = read(value.split(" (ignore_errors=")[0])
            assignments = (line.strip() for line in text.splitlines())
            for line in assignments:
                key, equals, assigned = line.partition("=")
                if equals and not line.startswith(("#", ";")):
                    values[key.strip()] = " ".join(shlex.split(assigned))
    started = next((value for name, value in settings if name == "ExecStart"), "")
    words = re.search(r"argv\[\]=(.*?) ; ignore_errors=", started)
    arguments: list[str] = []
    for word in words[1].split()[1:] if words else []:
        if re.fullmatch(r"\$\w+", word):
            arguments += values.get(word[1:], "").split()
        else:
            arguments.append(re.sub(r"\$\{(\w+)\}", lambda match: values.get(match[1], ""), word))
    return arguments
