"""Write the two lists of every public variable, from the argument specifications of the roles and the plays.

usage: variables.py [--check]

docs/variables.md is for reading; inventory/example/group_vars/all.yml, with each variable commented out, for copying.
--check writes nothing and exits with 1 where one is not what the specifications say.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ANSIBLE = Path(__file__).parent
WIDTH = 120
PLAYS = "the plays"


class Group(NamedTuple):
    """The variables of one role, or of the plays."""

    name: str
    purpose: str
    options: dict[str, dict[str, Any]]


def groups(ansible: Path) -> list[Group]:
    """Return the plays' variables and each role's, in the order in which site.yml runs the roles."""
    plays = yaml.safe_load((ansible / "vars/plays.yml").read_text())["aerie_argument_spec"]
    found = [Group(PLAYS, "What every play and several roles read", plays)]
    (site,) = yaml.safe_load((ansible / "site.yml").read_text())
    for task in site["tasks"]:
        role = task.get("ansible.builtin.import_role") or task.get("ansible.builtin.include_role") or {}
        if "name" in role and "tasks_from" not in role:
            text = (ansible / "roles" / role["name"] / "meta/argument_specs.yml").read_text()
            main = yaml.safe_load(text)["argument_specs"]["main"]
            found.append(Group(role["name"], main["short_description"].rstrip("."), main["options"]))
    return found


def description(option: dict[str, Any]) -> str:
    """Return what the variable is for, with Ansible's markup as Markdown's."""
    text = option["description"]
    whole = (" ".join(text) if isinstance(text, list) else text) + (" A secret." if option.get("no_log") else "")
    # C(code), O(option), V(value) and the like; C(a=b) is how one writes a setting.
    return re.sub(r"\b[CEOV]\(([^)]*)\)", r"`\1`", " ".join(whole.split()))


def kind(option: dict[str, Any]) -> str:
    """Return the variable's type, or the values that it may have."""
    if "choices" in option:
        return ", ".join(str(choice) for choice in option["choices"])
    elements = f" of {option['elements']}" if "elements" in option else ""
    return f"{option.get('type', 'str')}{elements}"


def assignment(name: str, option: dict[str, Any]) -> str:
    """Return the YAML that sets the variable to its default."""
    text = yaml.safe_dump({name: option.get("default")}, width=WIDTH - 2, sort_keys=False)
    return text.rstrip()


def example(found: list[Group]) -> str:
    """Return the inventory's variables, each commented out."""
    lines = [
        "---",
        "## Every public variable with its default: take the # away where yours differs. Secrets go into a vault.",
        "## Written by ansible/variables.py from the argument specifications; docs/host.md tells more.",
    ]
    for group in found:
        lines += ["", "", f"## == {group.name}: {group.purpose}"]
        for name, option in group.options.items():
            about = f"{description(option)} ({kind(option)})"
            lines += ["", *(f"## {line}" for line in textwrap.wrap(about, WIDTH - 3, break_on_hyphens=False))]
            lines += [f"# {line}" for line in assignment(name, option).splitlines()]
    return "\n".join(lines) + "\n"


def page(found: list[Group]) -> str:
    """Return the page of documentation."""
    lines = [
        "# Variables",
        "",
        "Every public variable, from the argument specifications. `ansible/variables.py` writes this page, and",
        "`ansible/inventory/example/group_vars/all.yml`, where each stands commented out.",
    ]
    for group in found:
        title = group.name.capitalize() if group.name == PLAYS else f"Role `{group.name}`"
        lines += ["", f"## {title}", "", f"{group.purpose}.", ""]
        lines += ["| variable | default | may be | |", "|---|---|---|---|"]
        for name, option in group.options.items():
            default = inline(option.get("default")).replace("|", "\\|")
            about = description(option).replace("|", "\\|")
            lines.append(f"| `{name}` | `{default}` | {kind(option)} | {about} |")
    return "\n".join(lines) + "\n"


def inline(value: Any) -> str:
    """Return a default as one line: a string as it is, all else as YAML."""
    if isinstance(value, str):
        return value or '""'
    text = yaml.safe_dump(value, width=10_000, sort_keys=False, default_flow_style=True)
    return text.removesuffix("...\n").rstrip()


def main(arguments: list[str]) -> int:
    """Write both files, or compare them; return the exit code."""
    found = groups(ANSIBLE)
    files = {
        ANSIBLE / "inventory/example/group_vars/all.yml": example(found),
        ANSIBLE.parent / "docs/variables.md": page(found),
    }
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    if arguments:
        for path in stale:
            print(f"{path} is not what the argument specifications say: run ansible/variables.py", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[path])
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
