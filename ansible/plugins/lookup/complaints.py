"""What is wrong with the names, types and sizes of a host's variables, and with the tags that a play is asked for."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from ansible import context
from ansible.errors import AnsibleError
from ansible.module_utils.common import validation
from ansible.plugins.lookup import LookupBase

if TYPE_CHECKING:
    from collections.abc import Iterable

DOCUMENTATION = """
name: complaints
short_description: What is wrong with a host's variables and with the tags that a play is asked for
description:
  - Tells variables whose names are nearly, and not quite, those of the roles and plays, values of another type, numbers
    that are out of range, and tags that the play does not have. Ansible itself takes most of them, and goes on without
    them, or ends where a role reads them, in words of its own.
  - The argument specifications are what is known. Names that are not near to one of theirs are the site's own.
  - Tags are the play's own where it is on the command line; in a playbook of the site's they may be of other plays.
  - Runs on the controller. Returns a list of sentences.
options:
  _terms:
    description: File name of the play, beside the directory of the roles.
    type: list
    elements: str
    required: true
"""

ANSIBLE = Path(__file__).parents[2]
# What the plays and roles tell each other. Nobody sets them, and some are near to what is set.
INTERNAL = {
    "aerie_before_service",
    "aerie_reboot_reasons",
    "aerie_reboot_required",
    "aerie_refusals",
}
# Letters that two names may not share: one that is wrong is two, a forgotten _ok three. Another word is more.
MOST_DIFFERENT = 3
SPECIAL_TAGS = {"all", "always", "never", "tagged", "untagged"}
MOST_PORT = 65535
# What an option of each type takes, and how that begins and ends in JSON, which alone brings it by the command line.
KINDS = {
    "bool": ("true or false", ""),
    "int": ("a whole number", ""),
    "float": ("a number", ""),
    "str": ("a string", ""),
    "path": ("a path", ""),
    "list": ("a list", "[...]"),
    "dict": ("a dictionary", "{...}"),
}


def of_names(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Complain of names that are near to a known one."""
    known = sorted(known)
    # A leading underscore is a role's own, and ansible_ is Ansible's.
    unknown = sorted(name for name in {*names} - {*known} - INTERNAL if not name.startswith(("_", "ansible_")))
    near = [(name, meant) for name in unknown for meant in difflib.get_close_matches(name, known, n=1, cutoff=0.8)]
    return [
        f"{name} is no variable of these plays: did you mean {meant}?"
        for name, meant in near
        if len(name) + len(meant) - 2 * _shared(name, meant) <= MOST_DIFFERENT
    ]


def _shared(one: str, other: str) -> int:
    return sum(block.size for block in difflib.SequenceMatcher(None, one, other).get_matching_blocks())


def of_types(values: dict[str, Any], options: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Complain, by name, of values that are not of the option's type and that the roles do not convert to it."""
    return {
        name: f"{name} is {_shown(value, options[name])}: give {_wanted(name, value, options[name])}"
        for name, value in sorted(values.items())
        if not _fits(value, options[name])
    }


def _fits(value: Any, option: dict[str, Any]) -> bool:
    match option["type"]:
        case "str" | "path":
            # Ansible would write those as Python does.
            return not isinstance(value, (dict, list))
        case "dict":
            # Of a string Ansible would make one where it checks it, and leave the roles the string.
            return isinstance(value, dict)
        case "list":
            # Roles split a string at its commas. A list in JSON would come to pieces with brackets and quotes.
            if isinstance(value, list):
                return all(_fits(element, {"type": option["elements"]}) for element in value)
            return isinstance(value, str) and not value.lstrip().startswith("[")
        case scalar:
            try:
                getattr(validation, f"check_type_{scalar}")(value)
            except (TypeError, ValueError, OverflowError):
                return False
            return True


def _shown(value: Any, option: dict[str, Any]) -> str:
    match value:
        case None:
            return "empty"
        case dict():
            return "a dictionary"
        case list():
            inner = next((element for element in value if isinstance(element, (dict, list))), None)
            return "a list" if inner is None else f"a list with {_shown(inner, option)} in it"
        # What is a collection is long, and has tokens in it, the vault's among them.
        case _ if option.get("no_log") or option["type"] in ("dict", "list"):
            return "a string" if isinstance(value, str) else "a number"
        case _:
            return repr(value)


def _wanted(name: str, value: Any, option: dict[str, Any]) -> str:
    kind, literal = KINDS[option["type"]]
    by = f""", on the command line by -e '{{"{name}": {literal}}}'""" if literal and isinstance(value, str) else ""
    about = option["description"]
    about = " ".join(about if isinstance(about, list) else [about])
    # Without Ansible's markup of code, options and values.
    return f"{kind}{by}. " + re.sub(r"\b[CEOV]\(([^)]*)\)", r"\1", about)


def of_sizes(values: dict[str, Any], options: dict[str, dict[str, Any]]) -> list[str]:
    """Complain of numbers out of range, where they are of the right type."""
    found = []
    for name, value in sorted(values.items()):
        if name == "aerie_serial":
            if not re.fullmatch(r"0*[1-9]\d*%?", str(value).strip()):
                found.append(f"aerie_serial is {value}: give a number of hosts from 1 on, or a share such as 25%.")
        elif options[name]["type"] in ("int", "float"):
            if name.endswith("_port"):
                if not 1 <= float(value) <= MOST_PORT:
                    found.append(f"{name} is {value}: give a port from 1 to {MOST_PORT}.")
            elif float(value) < 0:
                found.append(f"{name} is {value}: give a number that is not below 0.")
    return found


def of_tags(asked: Iterable[str], play: str, tags: list[str]) -> list[str]:
    """Complain of tags that the play does not have."""
    unknown = sorted({*asked} - {*tags} - SPECIAL_TAGS)
    return [f"{play} has no tag {tag}; it has {', '.join(tags)}." for tag in unknown]


def read_options(ansible: Path) -> dict[str, dict[str, Any]]:
    """Read every option of the plays and roles."""
    options: dict[str, dict[str, Any]] = yaml.safe_load((ansible / "vars/plays.yml").read_text())["aerie_argument_spec"]
    for path in sorted(ansible.glob("roles/*/meta/argument_specs.yml")):
        options |= yaml.safe_load(path.read_text())["argument_specs"]["main"]["options"]
    return options


def read_tags(play: Path) -> list[str]:
    """Read the tags of a play's tasks, in their order."""
    tasks = [task for each in yaml.safe_load(play.read_text()) for task in each["tasks"]]
    return list(dict.fromkeys(task["tags"] for task in tasks if task["tags"] != "always"))


class LookupModule(LookupBase):
    """Entry point for Ansible."""

    def run(self, terms: list[Any], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[str]:  # noqa: ARG002
        """Return the complaints."""
        (play,) = terms
        given = variables or {}
        options = read_options(ANSIBLE)
        values = self._values(given, options)
        types = of_types(values, options)
        sizes = of_sizes({name: value for name, value in values.items() if name not in types}, options)
        found = [*types.values(), *of_names(given, options), *sizes]
        if play in (Path(playbook).name for playbook in context.CLIARGS.get("args", ())):
            asked = [*given["ansible_run_tags"], *given["ansible_skip_tags"]]
            found += of_tags(asked, play, read_tags(ANSIBLE / play))
        return found

    def _values(self, given: dict[str, Any], options: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Return the values of the options that the host has, but for those that only their role can work out."""
        values = {}
        for name in options.keys() & given.keys():
            try:
                values[name] = self._templar.template(given[name])
            except AnsibleError:
                continue
        return values
