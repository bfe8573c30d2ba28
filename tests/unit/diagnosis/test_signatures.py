"""The known failures: their file is checked, and every entry recognises the log that it came from."""

import pytest

from aerie.diagnosis import Collector, Evidence, Kind, Severity, parse_kernel
from aerie.diagnosis.signatures import SIGNATURES, SignatureError, Where, signatures
from aerie.startup.lines import parse

ENTRY = """\
- id: port-taken
  title: The port is taken
  match: "Address already in use"
  where: cause
  kind: configuration
  severity: fatal
  cause: Somebody else listens there.
  remedy: Choose another.
  source: vllm/entrypoints/launcher.py (0.32.0)
  excerpt: |
    OSError: [Errno 98] Address already in use
"""


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "signatures.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_an_entry_is_read_with_its_pattern_and_choices(written):
    (entry,) = signatures(written(ENTRY))
    assert (entry.id, entry.kind, entry.severity, entry.where) == (
        "port-taken",
        Kind.CONFIGURATION,
        Severity.FATAL,
        Where.CAUSE,
    )
    assert entry.match.search(entry.excerpt)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            ("kind: configuration", "kind: weather"),
            "1 (port-taken): kind is 'weather', expected one of configuration",
        ),
        (("severity: fatal", "severity: bad"), "severity is 'bad', expected one of fatal, degraded, harmless"),
        (("where: cause", "where: log"), "where is 'log', expected one of cause, line, evidence"),
        (("where: cause", "where: line"), "needle, a literal that each such line contains, belongs to `where: line`"),
        (("where: cause", "where: cause\n  needle: x"), "needle, a literal"),
        (("where: cause", "where: evidence\n  frame: x"), "frame, a regular expression, belongs to `where: cause`"),
        (("where: cause", "where: cause\n  frame: '('"), "frame is no regular expression"),
        (
            ('"Address already in use"', '"(Address"'),
            "match is no regular expression: missing ), unterminated",
        ),
        (("source: vllm/entrypoints/launcher.py (0.32.0)", "source: ''"), "source must be a text that is not empty"),
        (("  title: The port is taken\n", ""), "title must be a text that is not empty, and is None"),
        (("severity: fatal", "severity: fatal\n  known: perhaps"), "known is 'perhaps', expected true or false"),
        (("id: port-taken", "id: Port taken"), "id must be words of small letters"),
        (("  title:", "  titel: x\n  title:"), "titel is no field of a signature"),
    ],
)
def test_a_wrong_entry_is_named_with_what_was_expected(written, change, problem):
    with pytest.raises(SignatureError) as refused:
        signatures(written(ENTRY.replace(*change)))
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (ENTRY + ENTRY, "id port-taken stands 2 times"),
        ("- just words\n", "is str, expected a mapping of id, title"),
        ("id: port-taken\n", "must be a list of signatures, and is dict"),
        ("[]\n", "must be a list of signatures"),
        ("- [unclosed\n", "signatures.yaml is no YAML"),
    ],
)
def test_a_wrong_file_is_refused(written, text, problem):
    with pytest.raises(SignatureError, match=r"signatures\.yaml") as refused:
        signatures(written(text))
    assert problem in str(refused.value)


def test_there_are_at_least_sixty():
    assert len(signatures(SIGNATURES)) >= 60


def outside(known):
    """The kernel's lines; what the supervisor saw by itself stands in plain words."""
    lines = known.excerpt.splitlines()
    return parse_kernel(known.excerpt) or [Evidence("supervisor", None, line, kind=known.kind) for line in lines]


@pytest.mark.parametrize("known", signatures(SIGNATURES), ids=lambda known: known.id)
def test_every_excerpt_is_recognised_as_what_it_is(known):
    collector = Collector()
    if known.where is Where.EVIDENCE:
        diagnosis = collector.diagnose("was killed by SIGKILL", outside(known))
    else:
        collector.feed(parse(known.excerpt))
        diagnosis = collector.diagnose("ended with exit code 1", kind=Kind.HUNG if known.kind is Kind.HUNG else None)
    if known.severity is Severity.FATAL:
        assert diagnosis is not None
        assert diagnosis.signature == known.id
    else:
        assert known in collector.noticed
        assert Collector().diagnose() is None


def test_a_frame_tells_the_same_words_apart(written):
    (known,) = signatures(written(ENTRY.replace("where: cause", "where: cause\n  frame: worker.py in capture_model")))
    frame = '  File "/v/site-packages/vllm/worker.py", line 1, in {}\n'
    log = "Traceback (most recent call last):\n" + frame + "OSError: Address already in use\n"
    for function, signature in (("capture_model", "port-taken"), ("load_model", None)):
        collector = Collector([known])
        collector.feed(parse(log.format(function)))
        assert collector.diagnose().signature == signature


def test_a_fatal_line_alone_is_a_failure_unless_it_was_outlived(written):
    (known,) = signatures(written(ENTRY.replace("where: cause", "where: line\n  needle: Address")))
    collector = Collector([known])
    collector.feed(parse("WARNING 11-29 13:00:00 [a.py:1] Address already in use\n"))
    assert collector.diagnose().signature == "port-taken"
    collector.feed(parse("INFO:     Application startup complete.\n"))
    assert collector.diagnose() is None


@pytest.mark.parametrize("known", signatures(SIGNATURES), ids=lambda known: known.id)
def test_every_line_signature_is_found_by_its_needle(known):
    if known.where is Where.LINE:
        assert any(known.needle in line.text and known.match.search(line.text) for line in parse(known.excerpt))
