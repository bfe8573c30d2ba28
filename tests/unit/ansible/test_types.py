"""Wherever a flag or a number is read it is converted first, for `-e NAME=false` gives the string "false".

A specification takes such a string for the type that it names and converts nothing, and nothing overrides a variable of
the command line.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import yaml
from jinja2 import Environment, nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

ANSIBLE = Path(__file__).parents[3] / "ansible"
CONVERSIONS = {"bool": {"bool"}, "int": {"int", "float"}, "float": {"float"}}
"""The filters after which an option is what its type says."""
CONDITIONS = {"when", "that", "until", "failed_when", "changed_when"}
"""Keys of a task whose values are expressions without braces."""
PART_OF_A_CONDITION = "good"
"""Key of a loop's items, in braces, that an assertion over them reads."""
VARIABLES = {"vars", "ansible.builtin.set_fact", "set_fact"}
"""Keys of a task whose mappings name variables, which are read elsewhere."""


class Expression(NamedTuple):
    """A template, or a condition, of a file."""

    line: int
    text: str
    condition: str = ""
    """The key of the condition that it is."""
    variable: str = ""
    """The variable that it is the value of, or a part of it."""


def typed_options(ansible: Path = ANSIBLE) -> dict[str, str]:
    """Return the options of the roles and the plays that are flags or numbers, with their types."""
    options = dict(yaml.safe_load((ansible / "vars/plays.yml").read_text())["aerie_argument_spec"])
    for file in ansible.glob("roles/*/meta/argument_specs.yml"):
        options |= yaml.safe_load(file.read_text())["argument_specs"]["main"]["options"]
    return {name: option["type"] for name, option in options.items() if option.get("type") in CONVERSIONS}


OPTIONS = typed_options()


def expressions(file: Path) -> Iterator[Expression]:
    """Return every expression of a play, of tasks, handlers or variables, or of a template."""
    text = file.read_text()
    if file.suffix == ".j2":
        yield Expression(1, text)
    elif (root := yaml.compose(text, Loader=yaml.SafeLoader)) is not None:
        yield from within(root, variables=file.parent.name in {"vars", "defaults"})


def within(node: yaml.Node, key: str = "", variable: str = "", *, variables: bool = False) -> Iterator[Expression]:
    """Return the expressions below a node that stands under a key; its own keys may be variables."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            is_variable = variables and not variable
            yield from within(
                value,
                name.value,
                name.value if is_variable else variable,
                variables=not is_variable and name.value in VARIABLES,
            )
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from within(value, key, variable, variables=variables)
    elif isinstance(node, yaml.ScalarNode):
        is_template = "{{" in node.value or "{%" in node.value
        if is_template or key in CONDITIONS:
            text = node.value if is_template else f"{{{{ ({node.value}) }}}}"
            line = node.start_mark.line + (2 if node.style in {"|", ">"} else 1)
            yield Expression(line, text, key if key in {*CONDITIONS, PART_OF_A_CONDITION} else "", variable)


def mistakes(expression: Expression) -> Iterator[str]:
    """Return each option that the expression reads as what it may not be, with its line."""
    tree = Environment(autoescape=True).parse(expression.text)
    parents = {child: node for node in every(tree) for child in node.iter_child_nodes()}
    for name in tree.find_all(nodes.Name):
        if name.name in OPTIONS and not is_right(name, parents, expression):
            yield f"{expression.line + name.lineno - 1}: {name.name} ({OPTIONS[name.name]})"


def every(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    for child in node.iter_child_nodes():
        yield from every(child)


def is_right(name: nodes.Name, parents: dict[nodes.Node, nodes.Node], expression: Expression) -> bool:
    """Tell whether an option is converted, or no more than printed or passed on."""
    child: nodes.Node = name
    while True:
        parent: Any = parents[child]
        match parent:
            case nodes.Filter(name="default"):
                pass
            case nodes.Filter(name="map", args=[nodes.Const(value=filter_)]) | nodes.Filter(name=filter_) if (
                child is parent.node
            ):
                return filter_ in CONVERSIONS[OPTIONS[name.name]]
            case nodes.CondExpr() if child is not parent.test:
                pass
            case nodes.List() | nodes.Dict() | nodes.Pair():
                pass
            case nodes.Concat():
                return True
            case nodes.Output():
                if expression.condition:
                    return False
                is_passed_on = expression.variable and len(parent.nodes) == 1
                return not is_passed_on or OPTIONS.get(expression.variable) == OPTIONS[name.name]
            case _:
                return False
        child = parent


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("nvidia_driver_hold", ["nvidia_driver_hold (bool)"]),
        ("not nvidia_driver_hold or nvidia_driver_hold | bool", ["nvidia_driver_hold (bool)"]),
        ("vllm_expose | default(false) | bool", []),
        ("'--hold' if nvidia_driver_hold else ''", ["nvidia_driver_hold (bool)"]),
        ("[vllm_gpus, 1] | max > 1", ["vllm_gpus (int)"]),
        ("[vllm_gpus | int, 1] | max > 1", []),
        ("[vllm_gpus, 1] | map('int') | max > 1", []),
        ("vllm_gpus // 2 == 1", ["vllm_gpus (int)"]),
        ("'of ' ~ vllm_gpus == ''", []),
    ],
)
def test_what_is_a_mistake(text: str, found: list[str]) -> None:
    expression = Expression(1, f"{{{{ ({text}) }}}}", "when")
    assert [mistake.removeprefix("1: ") for mistake in mistakes(expression)] == found


FILES = sorted(
    file
    for pattern in ("*.yml", "tasks/*.yml", "vars/*.yml", "roles/*/[dhtv]*/*.yml", "roles/*/templates/*.j2")
    for file in ANSIBLE.glob(pattern)
)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ANSIBLE)))
# Ansible doubles the backslashes that Jinja would warn of.
@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_flags_and_numbers_are_converted_where_they_are_read(file: Path) -> None:
    found = [mistake for expression in expressions(file) for mistake in mistakes(expression)]
    assert found == []


# Ansible warns of one where it fails, between the reason and its remedy.
def test_no_condition_is_in_braces() -> None:
    found = [
        f"{file.relative_to(ANSIBLE)}:{expression.line}"
        for file in FILES
        for expression in expressions(file)
        if expression.condition in CONDITIONS and not expression.text.startswith("{{ (")
    ]
    assert found == []
