"""What apt's own words mean where it could not install, and what helps."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Kind(NamedTuple):
    """A kind of failure: the words by which it is known, what they mean and what helps."""

    words: str
    meaning: str


# The first that is found counts.
KINDS = {
    "apt_locked": Kind(
        r"^E: Could not get lock /var/(lib/apt/lists|cache/apt/archives)",
        "Another program had apt's lock for {lock}: let it end, or stop it (systemctl stop unattended-upgrades)",
    ),
    # Not where apt says that it waits for the lock: it may have got it, and failed for something else.
    "dpkg_locked": Kind(
        r"^E: Could not get lock|Unable to acquire the dpkg|lock was locked by .* process",
        "Another program had dpkg's lock for {lock}: let it end, or stop it (systemctl stop unattended-upgrades)",
    ),
    "interrupted": Kind(
        r"dpkg was interrupted",
        "An earlier installation was cut short, so let dpkg end it there (dpkg --configure -a)",
    ),
    # Before what a full disk makes fail.
    "full": Kind(
        r"No space left on device|enough free space",
        "The disk is full, so make room (apt-get clean)",
    ),
    # The second is what Debian 13's sqv says.
    "expired": Kind(
        r"EXPKEYSIG|is not live",
        "The key of a repository has expired, so bring its present one to where the source has it (Signed-By)",
    ),
    "unsigned": Kind(
        r"NO_PUBKEY|BADSIG|is not signed|signature verification|Sub-process .*sqv",
        "A repository is not signed with the key that its source names (Signed-By), so mend the source",
    ),
    "outdated": Kind(
        r"^E: Failed to fetch .* 404 +Not Found",
        "A repository lacks a file that its own list names, as while a mirror is renewed: wait, or take another one",
    ),
    # Before what is not to be had for that.
    "unreachable": Kind(
        r"Could not resolve|Temporary failure|Could not connect|Connection failed|Connection refused|Failed to fetch"
        r"|Unable to connect",
        "A repository could not be reached, so mend the network, apt's sources, or its proxy (in /etc/apt/apt.conf.d)",
    ),
    "missing": Kind(
        r"Unable to locate package|has no installation candidate|Version .* was not found",
        "The repositories lack a package, so see what apt knows of it (apt-cache policy)",
    ),
    "build": Kind(
        r"Bad return status for module build|dkms.*fail|error processing package .*dkms",
        "Kernel modules could not be built, so see why (/var/lib/dkms/*/*/build/make.log)",
    ),
    # Not where apt only says that held packages will be changed.
    "conflict": Kind(
        r"held broken packages|^E: Held packages were changed|unmet dependencies",
        "Packages stand against each other: see what is held (apt-mark showhold) or from elsewhere (apt-cache policy)",
    ),
}

LOCKED = ("apt_locked", "dpkg_locked")

# Of apt, dpkg and dkms; who has dpkg's lock; and what stands below: a reason, or a package that stands against others.
COMPLAINT = re.compile(r"E: (?!The following information)|W:|Waiting for cache lock:|Error!|dpkg: error| [a-z0-9]\S* ")
LAST_LINES = 3


# What apt goes on after: of a source, with the reason below.
WARNING = re.compile(r"W:|Err:|Ign:|  ")


def kind_of(lines: Sequence[str]) -> str:
    """Return the kind of failure that a command's output shows, "" where it is none of these."""
    kind = _first([line for line in lines if not WARNING.match(line)])
    # A source that failed may be why a package is not to be had; of anything else it is no reason.
    return _first(lines) if kind in ("", "missing") else kind


def _first(lines: Sequence[str]) -> str:
    return next((name for name, kind in KINDS.items() if any(re.search(kind.words, line) for line in lines)), "")


def waited(lines: Sequence[str], kind: str) -> bool:
    """Whether apt-get has waited for the lock: for dpkg's it does (DPkg::Lock::Timeout), and apt-mark for none."""
    return kind == "dpkg_locked" and any(
        line.startswith("E: ") and re.search(KINDS[kind].words, line) for line in lines
    )


def holder(lines: Sequence[str], kind: str) -> str:
    """Return which lock was held, and by whom as far as that is said."""
    line = next(line for line in lines if re.search(KINDS[kind].words, line))
    lock = re.sub(r"^(E: Could not get lock |dpkg: error: )", "", line)
    return re.sub(r"(\. It is held| was locked) by ", ", held by ", lock)


def meaning(kind: str, lock_timeout: float, lock_variable: str) -> str:
    """Return what a kind of failure means and what helps, for a lock that was waited for as long as a variable says."""
    return KINDS[kind].meaning.format(lock=f"{lock_timeout:g} seconds ({lock_variable})")


def complaints(lines: Sequence[str]) -> list[str]:
    """Return what was complained of, or else the last that was said."""
    return list(dict.fromkeys(line for line in lines if COMPLAINT.match(line))) or list(lines[-LAST_LINES:])
