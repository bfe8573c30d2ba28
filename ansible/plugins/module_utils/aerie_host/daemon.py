"""Docker's daemon.json: what is wanted of it, what it takes for a change to count, and what it would leave behind."""

from __future__ import annotations

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


def root_left_behind(before: Object, after: Object) -> str:
    """Return what to do where the change would leave data in the old root, empty where it would not."""
    old, new = (Path(str(content.get("data-root", DATA_ROOT))) for content in (before, after))
    left = data_in(old)
    if old == new or not left or data_in(new):
        return ""
    return (
        f"Docker's data root is {old} and has {' and '.join(left)}; with data-root {new} they would be out of sight. "
        f"Data is never moved by itself. Either keep {old} (docker_daemon_config: {{data-root: {old}}}), or move it: "
        f"stop what runs (systemctl stop docker.socket docker), copy (rsync -aHAXS --numeric-ids {old}/ {new}/), run "
        f"this again, and remove {old} when everything is there. Nothing was changed"
    )


def driver_left_behind(before: Object, after: Object) -> str:
    """Return what to do where another storage driver would leave data behind, empty where it would not."""
    old, new = (content.get("storage-driver") for content in (before, after))
    root = Path(str(before.get("data-root", DATA_ROOT)))
    left = data_in(root)
    if old == new or not left:
        return ""
    return (
        f"{root} has {' and '.join(left)}, and with storage-driver {new or 'unset'} (was {old or 'unset'}) the daemon "
        "may not see them; running containers lose their files. Keep the driver, or stop and remove the containers and "
        "save the images (docker save) before it changes. Nothing was changed"
    )


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
