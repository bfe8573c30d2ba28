"""Writes docs/troubleshooting.md: its head by hand (handbook.md), the failures from the signatures.

Run: python -m aerie.diagnosis.handbook >docs/troubleshooting.md
"""

import re
from collections.abc import Iterator
from pathlib import Path

from aerie.diagnosis.signatures import SIGNATURES, Severity, Signature, signatures
from aerie.startup.lines import parse

_HEAD = Path(__file__).with_name("handbook.md")
_LONGEST_SYMPTOM = 300  # characters


# A comment between the signatures names a part of the page.
_PART = re.compile(r"^# -{3,} (.+?) -{3,}$|^- id: ([\w-]+)", re.MULTILINE)
_WORDS = {
    Severity.DEGRADED: "no failure, but it serves worse than it could",
    Severity.HARMLESS: "harmless",
}
_ISSUE = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)\S*")


def handbook(path: Path = SIGNATURES) -> str:
    """Return the page. Raises SignatureError."""
    known = {one.id: one for one in signatures(path)}
    blocks = [_HEAD.read_text(encoding="utf-8").strip()]
    for title, members in _parts(path.read_text(encoding="utf-8")):
        links = "\n".join(f"- [{known[name].title}](#{name})" for name in members)
        blocks += [f"## {title}", links, *(block for name in members for block in _entry(known[name]))]
    return "\n\n".join(blocks) + "\n"


def _parts(text: str) -> list[tuple[str, list[str]]]:
    parts: list[tuple[str, list[str]]] = []
    for title, name in _PART.findall(text):
        if title or not parts:
            parts.append((title or "Known failures", []))
        if name:
            parts[-1][1].append(name)
    return [part for part in parts if part[1]]


def _entry(known: Signature) -> Iterator[str]:
    yield f'<a id="{known.id}"></a>\n\n### {known.title}'
    yield f"```text\n{_symptom(known)}\n```"
    yield known.cause
    yield f"**Do:** {known.remedy}"
    yield f"`{known.id}`: {_WORDS.get(known.severity, known.kind)}; {_source(known.source)}"


def _symptom(known: Signature) -> str:
    """Return the line by which it is recognised, or the lines, cut where they are very long."""
    text = "\n".join(line.text for line in parse(known.excerpt))
    found = known.match.search(text)
    if not found:
        return text
    begin, end = text.rfind("\n", 0, found.start()) + 1, (text + "\n").find("\n", found.end())
    first = found.start() if found.end() - begin > _LONGEST_SYMPTOM else begin
    last = min(end, max(first + _LONGEST_SYMPTOM, found.end()))
    return ("... " if first > begin else "") + text[first:last].strip() + (" ..." if last < end else "")


def _source(source: str) -> str:
    if issue := _ISSUE.fullmatch(source):
        return f"[{issue[1]}#{issue[2]}]({source})"
    return f"<{source}>" if source.startswith("https://") and " " not in source else source


if __name__ == "__main__":
    print(handbook(), end="")
