"""Role vllm against what is known to hang or to corrupt, and what it makes of the host's fabric.json: one play."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tried_play import outcomes_of

REPOSITORY = Path(__file__).parents[3]
ROLE = str(REPOSITORY / "ansible/roles/vllm")
DEAD = {"peer_to_peer": "dead", "environment": "one-switch", "numa_nodes": [0]}

ALONE = r"NCCL_P2P_DISABLE=1 alone hangs in autotuning.*disable-custom-all-reduce: true"
GRAPH = r"NCCL_GRAPH_FILE describes one communicator"

# Each: the role's variables, then all that it says; nothing where it lets them pass.
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "as shipped": ({}, []),
    "one switch": ({"__vllm_fabric": {"environment": "one-switch"}}, []),
    "peers dead": ({"__vllm_fabric": DEAD}, []),
    "peers dead, and the site switches them on": (
        {"__vllm_fabric": DEAD, "vllm_engine_env": {"NCCL_P2P_DISABLE": 0}},
        [r"do not arrive.*sets NCCL_P2P_DISABLE to 0: the first all-reduce would hang"],
    ),
    "peers dead, and the site switches vLLM's own all-reduce on": (
        {"__vllm_fabric": DEAD, "vllm_engine_overrides": {"disable-custom-all-reduce": False}},
        [ALONE],
    ),
    "all that harms": (
        {
            "vllm_engine_env": {
                "NCCL_P2P_DISABLE": "1",
                "NCCL_GRAPH_FILE": "/etc/graph.xml",
                "NCCL_PROTO": "LL,LL128,Simple",
                "NCCL_BUFFSIZE": 33554432,
                "NCCL_MIN_NCHANNELS": 16,
            },
            "vllm_engine_overrides": {"decode-context-parallel-size": 4},
        },
        [
            ALONE,
            GRAPH,
            r"NCCL_PROTO=LL,LL128,Simple forces LL128.*can corrupt data",
            r"takes 24.00 GB of shared memory.*has 16gb.*AERIE_SHM_SIZE: 28gb",
        ],
    ),
    "the same by other names": (
        {
            "vllm_engine_env": {"NCCL_P2P_LEVEL": "LOC", "NCCL_GRAPH_FILE": "/etc/graph.xml"},
            "vllm_engine_overrides": {"tensor-parallel-size": 4, "pipeline-parallel-size": 2},
        },
        [ALONE, GRAPH],
    ),
    "the same as it does no harm": (
        {
            "vllm_engine_env": {
                "NCCL_P2P_DISABLE": 1,
                "NCCL_GRAPH_FILE": "/etc/graph.xml",
                "NCCL_PROTO": "^LL128",
                "NCCL_BUFFSIZE": 33554432,
                "NCCL_MIN_NCHANNELS": 16,
            },
            "vllm_engine_overrides": {"disable-custom-all-reduce": True, "decode-context-parallel-size": 8},
            "vllm_compose_env": {"AERIE_SHM_SIZE": "28gb"},
        },
        [],
    ),
    "two sockets, binding shown to work": (
        {"__vllm_fabric": {"environment": "turin", "numa_nodes": [0, 1], "numa_binding": "works"}},
        [],
    ),
    "two sockets, binding not shown": (
        {"__vllm_fabric": {"environment": "two-sockets", "numa_nodes": [0, 1], "numa_binding": "unproven"}},
        [],
    ),
}

Outcome = dict[str, Any]


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """What the role makes of each case, by the case's name."""
    directory = tmp_path_factory.mktemp("fabric")
    tasks: list[dict[str, Any]] = [case(name, variables) for name, (variables, _) in CASES.items()]
    return outcomes_of(tasks, directory)


def case(name: str, variables: dict[str, Any]) -> dict[str, Any]:
    """A block that runs the role's rules with these variables, and notes what was said and what the engine gets."""

    def note(said: str | list[str]) -> dict[str, Any]:
        outcome = {
            "said": said,
            "fabric": "{{ __vllm_fabric_environment }}",
            "environment": "{{ __vllm_environment }}",
            "serve": "{{ __vllm_serve }}",
        }
        return {
            "ansible.builtin.set_fact": {"outcomes": "{{ outcomes | default({}) | combine({name: outcome}) }}"},
            "vars": {"name": name, "outcome": outcome},
        }

    rules = {"ansible.builtin.include_role": {"name": "vllm", "tasks_from": "fabric.yml", "public": True}}
    told = "{{ ansible_failed_result.results | selectattr('failed') | map(attribute='msg') }}"
    return {"block": [rules, note([])], "rescue": [note(told)], "vars": variables | {"role_path": ROLE}}


@pytest.mark.parametrize("name", CASES)
def test_rule(outcomes: dict[str, Outcome], name: str) -> None:
    said, wanted = outcomes[name]["said"], CASES[name][1]
    assert len(said) == len(wanted)
    for message, pattern in zip(said, wanted, strict=True):
        assert re.search(pattern, message)


def test_the_engine_of_a_host_with_dead_peers_gets_both_halves(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["peers dead"]
    assert outcome["fabric"] == "peer-dead"
    assert outcome["environment"]["NCCL_P2P_DISABLE"] == "1"
    assert outcome["serve"]["disable-custom-all-reduce"] is True


def test_a_host_of_which_nothing_is_known_gets_the_base_alone(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["as shipped"]
    assert outcome["fabric"] == "none"
    assert outcome["environment"]["NCCL_P2P_LEVEL"] == "SYS"
    assert not {"disable-custom-all-reduce", "numa-bind"} & set(outcome["serve"])


def test_what_differs_is_over_the_base(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["one switch"]["environment"]["NCCL_P2P_LEVEL"] == "PXB"


def test_ranks_are_bound_to_their_node_where_that_was_shown_to_work(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["two sockets, binding shown to work"]["serve"]["numa-bind"] is True
    assert "numa-bind" not in outcomes["two sockets, binding not shown"]["serve"]
