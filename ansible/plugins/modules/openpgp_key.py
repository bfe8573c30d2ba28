"""Fetch a repository's signing key, and keep it only if it is the one that is expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from ansible.module_utils.aerie_host import openpgp
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import open_url

DOCUMENTATION = """
module: openpgp_key
short_description: Fetch a repository's signing key, and keep it only if it is the expected one
description:
  - Writes the key in its binary form, which every apt reads. Where the file holds exactly that key, nothing is fetched.
  - A key is known by its fingerprint, not by its file's digest, which changes with each new signature on it. Needs no
    gpg.
options:
  url:
    description: Where the key is, C(https:), C(http:) or C(file:).
    type: str
    required: true
  fingerprint:
    description: The primary key's fingerprint; spaces and case do not matter.
    type: str
    required: true
  dest:
    description: The file, whose name must end in C(.gpg) for apt to take it for a binary one. Owned by root, mode 0644.
    type: path
    required: true
  timeout:
    description: Seconds that the server has to answer.
    type: int
    default: 10
  hint:
    description: What to do where the key cannot be had or is another one; put behind the message.
    type: str
    default: ""
"""

EXAMPLES = """
- name: Fetch the vendor's key
  openpgp_key:
    url: https://packages.example/key.pub
    fingerprint: EB69 3B30 35CD 5710 E231  E123 A4B4 6996 3BF8 63CC
    dest: /etc/apt/keyrings/vendor.gpg
"""

RETURN = """
fingerprints:
  description: Of the keys that the file now holds.
  returned: success
  type: list
"""


def held(path: Path) -> list[str]:
    """Return the fingerprints of the keys in a file; none where it is missing or no key file."""
    try:
        return openpgp.fingerprints(path.read_bytes())
    except (OSError, openpgp.NoKeyError):
        return []


def refuse(module: AnsibleModule, message: str) -> NoReturn:
    """Fail with the message and the caller's hint."""
    module.fail_json(msg=f"{message} {module.params['hint']}".strip())
    raise AssertionError


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "fingerprint": {"type": "str", "required": True, "no_log": False},
            "dest": {"type": "path", "required": True},
            "timeout": {"type": "int", "default": 10},
            "hint": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    url = module.params["url"]
    wanted = "".join(module.params["fingerprint"].split()).upper()
    path = Path(module.params["dest"])
    arguments: dict[str, Any] = {"path": str(path), "owner": "root", "group": "root", "mode": "0644"}

    before = held(path)
    changed = before != [wanted]
    if changed:
        try:
            content = open_url(url, timeout=module.params["timeout"]).read()
            found = openpgp.fingerprints(content)
        except openpgp.NoKeyError as error:
            refuse(module, f"What {url} gave is not a key: {error}. Nothing was kept.")
        except Exception as error:  # noqa: BLE001 -- open_url raises what the transport does
            refuse(module, f"The key {url} could not be fetched: {error}.")
        if found != [wanted]:
            others = " and ".join(found)
            refuse(module, f"The key {url} has the fingerprint {others}, and {wanted} is expected. Nothing was kept.")
        if not module.check_mode:
            temporary = Path(module.tmpdir) / path.name
            temporary.write_bytes(openpgp.dearmor(content))
            path.parent.mkdir(parents=True, exist_ok=True)
            module.atomic_move(str(temporary), str(path))
    if path.exists():
        changed = module.set_fs_attributes_if_different(
            module.load_file_common_arguments(module.params | arguments), changed
        )
    module.exit_json(
        changed=changed,
        fingerprints=[wanted],
        diff={
            "before_header": str(path),
            "after_header": str(path),
            "before": "".join(f"{one}\n" for one in before),
            "after": f"{wanted}\n",
        },
    )


if __name__ == "__main__":
    main()
