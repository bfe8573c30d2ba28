"""What a model with scripted weights says."""

from __future__ import annotations

import pytest

from aerie.checkpoint.script import Script


def test_the_chain_is_said_first_and_then_all_others_in_a_circle():
    script = Script(8, (5, 2, 7))
    assert script.continuation(5, 10) == [2, 7, 0, 1, 3, 4, 6, 5, 2, 7]
    assert sorted(script.follows) == list(range(8))
    assert [script.before[following] for following in script.follows] == list(range(8))


def test_a_reduced_vocabulary_has_the_chain():
    assert Script(8, (5, 2, 7)).drafted(5) == [0, 1, 2, 5, 7]
    assert Script(8, ()).drafted(8) == list(range(8))
    with pytest.raises(ValueError, match="a script of 3 tokens does not fit into 2"):
        Script(8, (5, 2, 7)).drafted(2)


@pytest.mark.parametrize(
    ("chain", "said"), [((1, 2, 1), "occurs twice"), ((1, 8), "token 8 is not in a vocabulary of 8")]
)
def test_a_chain_that_has_no_one_successor_is_refused(chain, said):
    with pytest.raises(ValueError, match=said):
        Script(8, chain)
