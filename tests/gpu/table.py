"""Shows results of tests/gpu as Markdown: `python tests/gpu/table.py RESULT.json...`."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def table(result: dict) -> str:
    """Return one result: where it is from, each contract's verdict, and the items that gave none."""
    packages = ", ".join(f"{name} {version}" for name, version in result["packages"].items())
    chip = f", compute capability {result['compute_cap']}, driver {result['driver_version']}" if result["gpus"] else ""
    lines = [
        f"{result['gpus']} x {result['gpu']}{chip}; Python {result['python']}, {packages}",
        f"{result['date']}, commit {result['commit'][:12]}, series {result['series'][:19]}",
        "",
        "| contract | engine | verdict | seen | seconds |",
        "|---|---|---|---|---|",
    ]
    for engine in ("contracts", "unpatched"):
        for verdict in result[engine]:
            seen = str(verdict.get("evidence") or verdict.get("reason") or "").replace("\n", " ").replace("|", "\\|")
            lines.append(
                f"| `{verdict['contract']}` ({verdict['item']}) | {'patched' if engine == 'contracts' else engine} "
                f"| {judged(verdict)} | {seen[:300]} | {verdict['seconds']} |"
            )
    answered = {verdict["item"] for verdict in (*result["contracts"], *result["unpatched"])}
    for item in result["items"]:
        if item["item"] not in answered:
            measured = "measured" if item["item"] in result["measurements"] else "no verdict"
            lines.append(f"| ({item['item']}) | {item['engine']} | {measured} | {item['state']} | {item['seconds']} |")
    return "\n".join(lines) + "\n"


def judged(verdict: dict) -> str:
    """Return one word or two for a verdict; without the patches, a contract has to break, and for the known reason."""
    if "broken_as_expected" not in verdict:
        return "holds" if verdict["holds"] else "**broken**"
    if verdict["broken_as_expected"]:
        return "broken, as expected"
    return "**holds**" if verdict["holds"] else "**broken, for another reason**"


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(table(json.loads(Path(path).read_text())))
