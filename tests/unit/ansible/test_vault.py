"""Secrets in a vaulted file of an inventory, by the commands of docs/host.md and with ansible-vault itself."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[3]
KEY = "3Yk0-a-key-of-a-test-that-nobody-may-see-Zq9"
VAULT = "group_vars/aerie/vault.yml"


class Site:
    """A copy of the example inventory, for this machine, and a play of the one role task that writes the keys."""

    def __init__(self, root: Path) -> None:
        self.root, self.inventory, self.project = root, root / "site", root / "project"
        shutil.copytree(REPOSITORY / "ansible/inventory/example", self.inventory)
        hosts = yaml.safe_load((self.inventory / "hosts.yml").read_text())
        hosts["aerie"]["hosts"] = {"here": {
            "ansible_connection": "local", "ansible_python_interpreter": sys.executable,
            "vllm_project_dir": str(self.project),
        }}  # fmt: skip
        (self.inventory / "hosts.yml").write_text(yaml.safe_dump(hosts))
        (self.project / "secrets").mkdir(parents=True)
        (root / "play.yml").write_text(yaml.safe_dump([{
            "hosts": "aerie", "gather_facts": False,
            "tasks": [{"ansible.builtin.include_role": {"name": "vllm", "tasks_from": "key.yml"}}],
        }]))  # fmt: skip
        (root / "password").write_text("correct horse\n")

    def run(self, *command: str, **settings: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"ANSIBLE_CONFIG": str(REPOSITORY / "ansible/ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
        return subprocess.run(
            [sys.executable, "-m", "ansible", *command], cwd=self.root, env=environment | settings,
            text=True, capture_output=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def play(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        uid = f"__vllm_image_uid={os.getuid()}"
        return self.run("playbook", "-i", str(self.inventory), "play.yml", "-e", uid, "-vvv", "--diff", *arguments)

    def with_vault(self) -> Path:
        """Create the vault as a person does, with an editor that has the text."""
        (self.root / "plain.yml").write_text(f"---\nvllm_api_keys:\n  - {KEY}\n")
        vault = self.inventory / VAULT
        vault.parent.mkdir(parents=True)
        editor = f"cp {shlex.quote(str(self.root / 'plain.yml'))}"
        done = self.run(
            "vault", "create", "--skip-tty-check", "--vault-password-file", "password", str(vault), EDITOR=editor
        )
        assert done.returncode == 0, done.stderr
        return vault


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_vaulted_key_reaches_its_file_and_nothing_else(site: Site) -> None:
    vault = site.with_vault()
    assert KEY not in vault.read_text()
    assert vault.read_text().startswith("$ANSIBLE_VAULT;1.1;AES256\n")
    done = site.play("--vault-password-file", "password")
    assert done.returncode == 0, done.stdout
    keys = site.project / "secrets/api-keys"
    assert keys.read_text() == f"{KEY}\n"
    assert stat.S_IMODE(keys.stat().st_mode) == 0o400
    assert KEY not in done.stdout + done.stderr
    again = site.play("--vault-password-file", "password")
    assert re.search(r"changed=0 .*failed=0", again.stdout)


@pytest.mark.parametrize("password", [None, "wrong horse\n"])
def test_without_the_password_nothing_is_written(site: Site, password: str | None) -> None:
    site.with_vault()
    if password:
        (site.root / "password").write_text(password)
    done = site.play(*(["--vault-password-file", "password"] if password else []))
    assert done.returncode != 0
    expected = "Decryption failed" if password else "no vault secrets found"
    assert expected in done.stdout + done.stderr
    assert list((site.project / "secrets").iterdir()) == []


def test_the_page_names_the_very_place(site: Site) -> None:
    page = (REPOSITORY / "docs/host.md").read_text()
    assert f"ansible-vault create ansible/inventory/site/{VAULT}" in page
    assert "--ask-vault-pass" in page
