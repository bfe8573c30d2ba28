"""A role's settings go into a site's JSON file and come out of it; the site's stay."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aerie_host.merged import MISSING, Merge, Setting, Share, merge

SITE = {"registry-mirrors": ["https://mirror.example"], "log-opts": {"labels": "team"}, "debug": False}
OURS = {"log-driver": "local", "log-opts": {"max-size": "20m"}, "live-restore": True}


def again(done: Merge) -> Share:
    """The share as the next run reads it."""
    return Share.from_json(json.loads(json.dumps(done.share.to_json())))


def test_the_sites_values_stay_and_undo_gives_the_file_back() -> None:
    done = merge(SITE, None, OURS)
    assert done.content == SITE | OURS | {"log-opts": {"labels": "team", "max-size": "20m"}}
    assert list(done.content)[:3] == list(SITE)
    assert done.replaced == {}
    assert merge(done.content, again(done), {}).content == SITE


def test_a_second_merge_changes_nothing() -> None:
    done = merge(SITE, None, OURS)
    second = merge(done.content, again(done), OURS)
    assert json.dumps(second.content) == json.dumps(done.content)
    assert second.share == done.share


def test_what_stood_there_is_told_and_comes_back() -> None:
    done = merge({"log-driver": "syslog"}, None, OURS)
    assert done.replaced == {("log-driver",): Setting("syslog", "local")}
    assert merge(done.content, again(done), OURS).replaced == done.replaced
    assert merge(done.content, again(done), {}).content == {"log-driver": "syslog"}


def test_a_setting_that_the_role_no_longer_wants_goes() -> None:
    done = merge(SITE, None, OURS)
    fewer = merge(done.content, again(done), {"live-restore": True})
    assert fewer.content == SITE | {"live-restore": True}


def test_a_setting_that_somebody_changed_since_is_theirs() -> None:
    done = merge({}, None, OURS)
    theirs = done.content | {"log-driver": "journald"}
    out = merge(theirs, again(done), {})
    assert out.content == {"log-driver": "journald"}
    assert out.kept == {("log-driver",): "journald"}
    # Set again, it is what comes back from then on.
    once_more = merge(theirs, again(done), OURS)
    assert once_more.replaced == {("log-driver",): Setting("journald", "local")}
    assert once_more.kept == {}


def test_a_file_of_the_roles_own_is_known_as_such() -> None:
    done = merge(None, None, OURS)
    out = merge(done.content, again(done), {})
    assert (out.content, out.share.created) == ({}, True)
    assert not merge({}, None, OURS).share.created


@pytest.mark.parametrize("there", ["a text", ["a list"], None, 1])
def test_an_object_takes_the_place_of_something_else_whole(there: Any) -> None:
    done = merge({"log-opts": there}, None, {"log-opts": {"max-size": "20m"}})
    assert done.content == {"log-opts": {"max-size": "20m"}}
    assert merge(done.content, again(done), {}).content == {"log-opts": there}


def test_true_is_not_1() -> None:
    assert merge({"mtu": 1}, None, {"mtu": True}).replaced == {("mtu",): Setting(before=1, ours=True)}


def test_an_object_without_keys_is_a_setting() -> None:
    done = merge({}, None, {"runtimes": {}})
    assert done.share.settings == {("runtimes",): Setting(MISSING, {})}
