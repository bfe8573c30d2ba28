"""Merge settings into Docker's daemon.json, validated by dockerd, and tell what it takes for them to count."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie_host import daemon, undo, undo_host
from ansible.module_utils.aerie_host.merged import Merge, Share, merge
from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: docker_daemon
short_description: Merge settings into Docker's daemon.json
description:
  - Writes C(/etc/docker/daemon.json), has the daemon read it again (SIGHUP), and restarts nothing. What the file had
    stays, but for the settings that are given. Each owner has its share of the file, recorded where C(undo) has its
    record; a setting that it no longer gives goes.
  - A data root that would be left behind with data is refused.
  - The file is replaced only by one that C(dockerd --validate) accepts together with the arguments of the daemon's
    unit.
options:
  owner:
    description: The role whose settings these are.
    type: str
    required: true
  config:
    description:
      - The owner's settings. An object is merged key by key, anything else replaces what is there; null takes a default
        out.
    type: dict
    default: {}
  defaults:
    description: Settings that count only where the file has nothing of that name at its top.
    type: dict
    default: {}
  leave:
    description:
      - The owner goes, so C(config) and C(defaults) are empty. A setting of its own by which the daemon finds its data
        stays in the file, as the site's, where there is data; otherwise that would be refused.
    type: bool
    default: false
"""

RETURN = """
restart:
  description: Settings that the running daemon takes over only when it is restarted, of earlier changes, too.
  returned: always
  type: list
reloaded:
  description: Settings that were changed and that the running daemon was told, by SIGHUP, to take over.
  returned: always
  type: list
kept:
  description: With C(leave), settings that stay in the file, since the daemon would not find its data without them.
  returned: always
  type: list
replaced:
  description: One line for each value of the site's, or of another role, that the owner's takes the place of.
  returned: always
  type: list
content:
  description: The file's content, as it is now or would be.
  returned: always
  type: dict
before:
  description: The file's text as it was, none where there was no file.
  returned: always
  type: str
"""

FILE = Path("/etc/docker/daemon.json")
STARTED_WITH = Path("/run/aerie/docker-daemon.json")
"""Which daemon started with which content of the file. Below /run, for it means nothing after a boot."""
UNIT = "docker.service"


def running_daemon() -> str:
    """Return what tells this daemon process from any later one, empty where none runs."""
    try:
        pid = Path("/run/docker.pid").read_text().strip()
        start = daemon.start_of(Path(f"/proc/{pid}/stat").read_text())
    except OSError:
        return ""
    return f"{pid} {start}" if start else ""


def pid_of(running: str) -> int:
    """Return the daemon's process id."""
    return int(running.partition(" ")[0])


def flags(running: str) -> list[str]:
    """Return the arguments that the daemon starts with next time."""
    if Path("/run/systemd/system").is_dir():
        shown = undo_host.run("systemctl", "show", UNIT, "--property", "ExecStart,Environment,EnvironmentFiles").out
        return daemon.flags_of_unit(shown, lambda name: Path(name).read_text() if Path(name).is_file() else "")
    if running:
        return Path(f"/proc/{pid_of(running)}/cmdline").read_bytes().decode().split("\0")[1:-1]
    return []


def validate(text: str, arguments: list[str]) -> str:
    """Return what dockerd has to say against a file of this text, empty for nothing."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(text)
        file.flush()
        done = undo_host.run("dockerd", "--validate", "--config-file", file.name, *arguments)
        # Without dockerd nothing is running that could refuse it; the daemon's first start will tell.
        return "" if done.rc in (0, 127) else (done.err or done.out).strip().replace(file.name, str(FILE))


def refuse(module: AnsibleModule, text: str, before: str, arguments: list[str], complaint: str) -> None:
    """Fail with whose fault it is that dockerd refuses the file."""
    earlier = validate(before, arguments) if before else ""
    whose = (
        f"{FILE} is refused by dockerd as it is, without this role's settings, and the daemon will not start with it: "
        "mend it"
        if earlier
        else f"With the settings that this role adds to {FILE} dockerd would not start: take the flag out of the unit "
        "(systemctl cat docker.service; DOCKER_OPTS in /etc/default/docker), or the setting out of docker_daemon_config"
        if "as a flag" in complaint
        else f"With the settings that this role adds to {FILE} dockerd would not start: correct docker_daemon_config"
    )
    module.fail_json(msg=f"{whose}. Nothing was changed. dockerd says: {earlier or complaint}", refused=text)


def started_with(running: str, content: dict[str, Any]) -> dict[str, Any]:
    """Return what the file held when this daemon started: what was noted then, or else what it holds now."""
    try:
        noted = json.loads(STARTED_WITH.read_text())
    except (OSError, ValueError):
        return content
    return dict(noted["content"]) if noted.get("daemon") == running else content


def note_start(running: str, content: dict[str, Any], *, differs: bool) -> None:
    """Note with what this daemon started, as long as the file holds something else."""
    if running and differs:
        STARTED_WITH.parent.mkdir(mode=0o755, exist_ok=True)
        undo_host.write(STARTED_WITH, json.dumps({"daemon": running, "content": content}).encode(), 0o600)
    else:
        STARTED_WITH.unlink(missing_ok=True)


def said(done: Merge) -> list[str]:
    """Tell each value that another one takes the place of."""
    return [
        f"{'.'.join(pointer)} was {json.dumps(one.before)}, is {json.dumps(one.ours)}"
        for pointer, one in done.replaced.items()
    ]


def check(module: AnsibleModule, content: dict[str, Any], done: Merge, before: str, running: str) -> None:
    """Fail where the daemon would not start with the file, or not find its data."""
    arguments = flags(running)
    if any(argument.startswith("--config-file") for argument in arguments):
        module.fail_json(
            msg=f"The daemon starts with {' '.join(arguments)} and so does not read {FILE}: take --config-file out of "
            "its unit (systemctl cat docker.service), or set docker_daemon_managed: false"
        )
    if told := daemon.left_behind(content, done.content):
        module.fail_json(msg=next(iter(told.values())))
    text = undo_host.to_text(done.content, done.share.text)
    if complaint := validate(text, arguments):
        refuse(module, text, before, arguments, complaint)


def write(text: str) -> None:
    """Replace the file; the site's owner and mode stay."""
    FILE.parent.mkdir(mode=0o755, exist_ok=True)
    status = FILE.stat() if FILE.exists() else None
    owned = (status.st_mode & 0o7777, status.st_uid, status.st_gid) if status else (0o644, 0, 0)
    # The site's own configuration management may have made it a link.
    undo_host.write(FILE.resolve(), text.encode(), *owned)


def keep_share(record: undo.Record, owner: str, share: Share) -> None:
    """Record what the owner has in the file from now on."""
    entry = record[owner]
    if share.settings:
        undo_host.note_directories(entry, FILE)
        entry.shares[str(FILE)] = share
    else:
        entry.shares.pop(str(FILE), None)
    undo_host.save(record)


def run(module: AnsibleModule) -> dict[str, Any]:
    """Merge, validate and write."""
    owner, config, defaults = (module.params[name] for name in ("owner", "config", "defaults"))
    there = undo_host.read_json(FILE)
    content = there or {}
    before = "" if there is None else FILE.read_text()
    record = undo_host.load()
    shares = record.setdefault(owner, undo.Entry()).shares
    share = shares.get(str(FILE), Share(created=there is None, text=before))
    # What the file would be without this owner's settings is what the defaults give way to.
    site = merge(there, share, {}).content
    done = merge(there, share, daemon.wanted(config, defaults, site))
    kept = daemon.left_behind(content, done.content) if module.params["leave"] else {}
    if kept:
        # With the data in it the setting is the site's from now on.
        share = replace(share, settings={at: one for at, one in share.settings.items() if at[0] not in kept})
        done = merge(there, share, {})
    gone = not done.content and done.share.created
    text = undo_host.to_text(done.content, done.share.text)
    settings = daemon.changed(content, done.content)
    differs = bool(settings) or (gone and there is not None)
    running = running_daemon()
    began = started_with(running, content)
    restart = daemon.need_restart(daemon.changed(began, done.content)) if running else []
    reloaded = [name for name in settings if running and name not in daemon.need_restart(settings)]
    if settings:
        check(module, content, done, before, running)
    if not module.check_mode:
        keep_share(record, owner, done.share)
        if differs and gone:
            FILE.unlink()
        elif differs:
            write(text)
        note_start(running, began, differs=bool(restart))
        if reloaded:
            with contextlib.suppress(ProcessLookupError):  # it has just ended, and reads the file when it starts
                os.kill(pid_of(running), signal.SIGHUP)
    after = ("" if gone else text) if differs else before
    return {
        "changed": differs,
        "restart": restart,
        "reloaded": reloaded,
        "replaced": said(done),
        "kept": list(kept),
        "content": done.content,
        "before": before,
        "diff": {"before_header": str(FILE), "before": before, "after": after},
    }


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "owner": {"type": "str", "required": True},
            "config": {"type": "dict", "default": {}},
            "defaults": {"type": "dict", "default": {}},
            "leave": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    try:
        with contextlib.nullcontext() if module.check_mode else undo_host.locked():
            result = run(module)
    except undo.UndoError as error:
        module.fail_json(
            msg=f"{error}. Nothing was changed: mend the file, or move it away, and run this again"
            if str(error).startswith(str(FILE))
            else str(error)
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
