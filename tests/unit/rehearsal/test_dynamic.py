"""What the pair is written of, and an engine that ends while it is asked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from aerie.checkpoint.shrink import Profile
from aerie.rehearsal import dynamic, steps
from aerie.rehearsal.findings import passed
from aerie.rehearsal.pair import TokenizerError
from aerie.rehearsal.service import RefusedError
from aerie.rehearsal.static.hardware import GIB, Hardware
from aerie.rehearsal.static.settings import settings_from

DIAGNOSIS = {"title": "A worker was killed", "cause": "The kernel did.", "remedy": "Add memory.", "source": None}


class Engine:
    """Ends in a while, as far as it is to."""

    def __init__(self, *, ends, diagnosis=DIAGNOSIS):
        self.ends, self.said = ends, diagnosis

    def ended(self, within=0.0):
        return self.ends and within > 0

    def diagnosis(self):
        return self.said

    def last_words(self):
        return "its last words"


class Service:
    def __init__(self, *, healthy):
        self.healthy = healthy

    def is_healthy(self):
        return self.healthy


@pytest.fixture
def ask(monkeypatch):
    def refused(_service):
        raise RefusedError("500 EngineCore encountered an issue")

    def asked(engine, service):
        monkeypatch.setattr(steps, "STEPS", {"text": refused, "picture": lambda _: [passed("picture", "seen")]})
        return [told.finding for told in dynamic._ask(engine, service, lambda _: None)]

    return asked


def test_it_is_told_once_and_with_why(ask):
    text, died = ask(Engine(ends=True), Service(healthy=False))
    assert (text.check, died.check) == ("text", "engine")
    assert died.text == "A worker was killed. The kernel did."
    assert died.remedy == "Add memory."


def test_without_a_diagnosis_it_is_its_last_words(ask):
    _, died = ask(Engine(ends=True, diagnosis=None), Service(healthy=False))
    assert (died.text, died.remedy) == ("it ended while it was asked", "its last words")


@pytest.mark.parametrize(("ends", "healthy"), [(False, False), (True, True)])
def test_one_that_goes_on_is_asked_further(ask, ends, healthy):
    assert [each.check for each in ask(Engine(ends=ends), Service(healthy=healthy))] == ["text", "picture"]


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("tokenizer", [None, Path("/k/tokenizer")])
def test_the_pair_has_the_tokenizer_of_the_arguments_and_its_code_only_where_that_is_allowed(
    monkeypatch, tokenizer, trusted
):
    given = {"trust-remote-code": trusted} | ({} if tokenizer is None else {"tokenizer": str(tokenizer)})
    settings = settings_from(given, Hardware("CPU", None, GIB, 0, 1))
    subject = SimpleNamespace(setup=SimpleNamespace(settings=settings, target=None, drafter=None), drafter_weights=None)
    written = []

    def write(*others, trusted):
        written.append((others[-1], trusted))
        raise TokenizerError("seen")

    monkeypatch.setattr(dynamic, "write_pair", write)
    told = []
    assert dynamic._write(subject, Path("/w"), Profile.CPU, told.append) is None
    assert (written, [each.text for each in told]) == ([(tokenizer, trusted)], ["seen"])
