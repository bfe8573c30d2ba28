"""What apt's words are taken to mean."""

from __future__ import annotations

import pytest
from aerie_host import apt

LISTS = "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 4242 (apt-get)"
ARCHIVES = "E: Could not get lock /var/cache/apt/archives/lock. It is held by process 4242 (apt-get)"
WAITS = "Waiting for cache lock: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 86 (python3)"
FRONTEND = "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 86 (python3)"


@pytest.mark.parametrize(
    ("kind", "output"),
    [
        ("apt_locked", [LISTS, "E: Unable to lock directory /var/lib/apt/lists/"]),
        ("apt_locked", [ARCHIVES, "E: Unable to lock directory /var/cache/apt/archives/"]),
        ("dpkg_locked", [FRONTEND]),
        (
            "dpkg_locked",
            [
                WAITS,
                "E: Unable to acquire the dpkg frontend lock (/var/lib/dpkg/lock-frontend), is another process [...]",
            ],
        ),
        ("dpkg_locked", ["dpkg: error: dpkg frontend lock was locked by another process with pid 86"]),
        # As Debian 13's dpkg has it.
        ("dpkg_locked", ["dpkg: error: dpkg frontend lock was locked by /usr/bin/python3.13 process with pid 30"]),
        (
            "interrupted",
            ["E: dpkg was interrupted, you must manually run 'dpkg --configure -a' to correct the problem."],
        ),
        ("full", ["E: You don't have enough free space in /var/cache/apt/archives/."]),
        # What fails for the want of room looks like much else.
        (
            "full",
            [
                "dpkg: error processing archive /var/cache/apt/archives/nvidia-kernel-open-dkms_580.deb (--unpack):",
                " cannot copy extracted data for './usr/src/nv.c' [...]: failed to write (No space left on device)",
                "E: Sub-process /usr/bin/dpkg returned an error code (1)",
            ],
        ),
        (
            "outdated",
            ["E: Failed to fetch http://mirror.example/[...]/runc_1.1.5.deb  404  Not Found [IP: 192.0.2.1 80]"],
        ),
        # What apt says where it may change what is held, and another source that did not answer, are no reasons.
        (
            "build",
            [
                "The following held packages will be changed:",
                "Error! Bad return status for module build on kernel: 6.12.57 (x86_64)",
                "E: Sub-process /usr/bin/dpkg returned an error code (1)",
            ],
        ),
        (
            "",
            ["The following held packages will be changed:", "E: Sub-process /usr/bin/dpkg returned an error code (1)"],
        ),
        (
            "conflict",
            [
                "Err:5 https://elsewhere.invalid stable InRelease",
                "  Could not resolve 'elsewhere.invalid'",
                "W: An error occurred during the signature verification. [...] EXPKEYSIG 0000000000000000 Somebody",
                "The following packages have unmet dependencies:",
                "E: Unable to correct problems, you have held broken packages.",
            ],
        ),
        ("expired", ["The following signatures were invalid: EXPKEYSIG A4B469963BF863CC cudatools"]),
        ("expired", ["Sub-process /usr/bin/sqv returned an error code (1): The primary key is not live"]),
        ("unsigned", ["Sub-process /usr/bin/sqv returned an error code (1): Missing key"]),
        ("unsigned", ["  The following signatures couldn't be verified because [...] NO_PUBKEY 8D81803C0EBFCD88"]),
        ("unreachable", ["E: Unable to connect to 127.0.0.1:9:"]),
        (
            "unreachable",
            [
                "Err:1 http://127.0.0.1:9/debian trixie InRelease",
                "  Could not connect to 127.0.0.1:9 (127.0.0.1). - connect (111: Connection refused)",
            ],
        ),
        # A package is not to be had because its source did not answer.
        (
            "unreachable",
            [
                "W: Failed to fetch http://mirror.example/[...]  Temporary failure resolving 'mirror.example'",
                "E: Unable to locate package docker.io",
            ],
        ),
        ("missing", ["E: Unable to locate package nvidia-driver-pinning-999"]),
        ("missing", ["E: Version '1.99.0-1' for 'nvidia-container-toolkit-base' was not found"]),
        ("missing", ["E: Package 'docker-ce' has no installation candidate"]),
        ("conflict", ["E: Unable to correct problems, you have held broken packages."]),
        # The lock was got, and then it failed.
        ("conflict", [WAITS, "The following packages have unmet dependencies:"]),
        (
            "build",
            [
                "Error! Bad return status for module build on kernel: 6.12.48 (x86_64)",
                "dpkg: error processing package nvidia-kernel-open-dkms (--configure):",
            ],
        ),
        ("", ["E: Something that nobody has seen before"]),
        ("", []),
    ],
)
def test_a_failure_is_known_by_apts_words(kind: str, output: list[str]) -> None:
    assert apt.kind_of(output) == kind


def test_every_kind_has_a_meaning_and_a_lock_tells_how_long_it_was_waited_for() -> None:
    assert all(apt.meaning(kind, 3, "docker_apt_lock_timeout") for kind in apt.KINDS)
    for kind, whose in (("apt_locked", "apt"), ("dpkg_locked", "dpkg")):
        assert apt.meaning(kind, 3, "docker_apt_lock_timeout").startswith(
            f"Another program had {whose}'s lock for 3 seconds (docker_apt_lock_timeout): let it end"
        )


def test_the_complaints_are_told_with_their_reason_and_each_once() -> None:
    output = f"""\
Get:1 http://127.0.0.1:8098/debian13/x86_64  InRelease [1,624 B]
Err:2 http://127.0.0.1:9 trixie InRelease
  Unable to connect to 127.0.0.1:9:
W: Failed to fetch http://127.0.0.1:9/dists/trixie/InRelease  Unable to connect to 127.0.0.1:9:
{WAITS}...
{WAITS}...
The following packages have unmet dependencies:
 nvidia-driver-cuda : Depends: libcuda1 (= 1) but it is not going to be installed
 - Original module
Error! Bad return status for module build on kernel: 6.12.48 (x86_64)
dpkg: error processing package nvidia-kernel-open-dkms (--configure):
 installed nvidia-kernel-open-dkms package post-installation script subprocess returned error exit status 10
Errors were encountered while processing:
 nvidia-kernel-open-dkms
E: The following information from --solver 3.0 may provide additional context:
E: Unable to correct problems, you have held broken packages.
""".splitlines()
    assert apt.complaints(output) == [output[number] for number in (3, 4, 7, 9, 10, 11, 15)]


def test_without_a_complaint_the_last_lines_stand_in() -> None:
    assert apt.complaints(["one", "two", "three", "four"]) == ["two", "three", "four"]
