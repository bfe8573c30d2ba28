"""`aerie model verify`: what damage it finds, how it tells it, how it mends it."""

import json
import os
import re
import shutil
import signal
import struct
import threading
import time
from pathlib import Path

import pytest
from cache_store import CONTENT, FIRST, SECOND, publish, write_files

from aerie import cli
from aerie.cache.manifest import MANIFEST
from aerie.cache.sources.source import Listing, Offer
from aerie.cache.users import hold


def safetensors(tensors):
    """Return a safetensors file of {name: bytes}."""
    at, header = 0, {}
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


SHARDS = {
    f"model-0000{number}-of-00003.safetensors": safetensors({f"w{number}": os.urandom(30000)}) for number in (1, 2, 3)
}
INDEX = json.dumps({"weight_map": {f"w{number}": f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}})
MODEL = CONTENT | SHARDS | {"model.safetensors.index.json": INDEX.encode()}
SHARD = "model-00002-of-00003.safetensors"


def run(*arguments):
    return cli.main(["model", *map(str, arguments)])


@pytest.fixture
def run_json(store, capsys):
    """Run verify with --json and return its exit code and the one report."""

    def run_(*arguments):
        code = run("verify", "--models-dir", store.root, "--json", *arguments)
        content = json.loads(capsys.readouterr().out)
        assert content["whole"] == (code == 0)
        (report,) = content["revisions"]
        return code, report

    return run_


@pytest.fixture
def copy_of(tmp_path):
    """A plain directory with the model's files, to repair from."""
    write_files(tmp_path / "copy", MODEL)
    return tmp_path / "copy"


def damage(path, name, change):
    """Replace a published file's content, as a broken disk or a person would."""
    file = path / name
    file.chmod(0o644)
    content = bytearray(file.read_bytes())
    file.write_bytes(change(content))
    file.chmod(0o444)


def flip(content):
    content[-100] ^= 4
    return content


def zeros(content):
    return bytes(len(content))


DAMAGES = {
    "a flipped bit": (lambda path: damage(path, SHARD, flip), SHARD, "altered"),
    "a shard of zeros": (lambda path: damage(path, SHARD, zeros), SHARD, "altered"),
    "a truncated shard": (lambda path: damage(path, SHARD, lambda content: content[:-1]), SHARD, "truncated"),
    "an empty file": (lambda path: damage(path, "config.json", lambda _: b""), "config.json", "truncated"),
    "an extended shard": (lambda path: damage(path, SHARD, lambda content: content + b"1"), SHARD, "too long"),
    "an extended empty file": (lambda path: damage(path, "empty.txt", lambda _: b"1"), "empty.txt", "too long"),
    "a missing shard": (lambda path: (path / SHARD).unlink(), SHARD, "missing"),
    "an altered Python file": (lambda path: damage(path, "modeling.py", flip_first), "modeling.py", "altered"),
    "an extra file": (lambda path: (path / "extra.py").write_bytes(b"1"), "extra.py", "extra"),
    "a symlink for a file": (lambda path: link(path, SHARD), SHARD, "no file"),
    "a symlink for a directory": (lambda path: link(path, "assets"), "assets", "extra"),
    "a directory for a file": (lambda path: directory_for(path, SHARD), SHARD, "no file"),
    "a pipe for a file": (lambda path: pipe_for(path, SHARD), SHARD, "no file"),
    "a file closed to the service": (lambda path: (path / SHARD).chmod(0o400), SHARD, "closed"),
    "a directory closed to the service": (lambda path: (path / "assets").chmod(0o700), "assets", "closed"),
    "a revision closed to the service": (lambda path: path.chmod(0o750), ".", "closed"),
    "a file that all may write to": (lambda path: (path / SHARD).chmod(0o666), SHARD, "writable"),
}


def flip_first(content):
    content[0] ^= 1
    return content


def link(path, name):
    outside = path.parents[2] / "outside"
    outside.mkdir(exist_ok=True)
    (path / name).rename(outside / Path(name).name)
    (path / name).symlink_to(outside / Path(name).name)


def directory_for(path, name):
    (path / name).unlink()
    (path / name).mkdir(mode=0o755)


def pipe_for(path, name):
    (path / name).unlink()
    os.mkfifo(path / name, 0o444)


@pytest.mark.parametrize("how", [[], ["--quick"]], ids=["full", "quick"])
def test_a_whole_model_is_whole(model, how, run_json):
    publish(model, MODEL)
    code, report = run_json(*how)
    assert code == 0
    assert report["read"] == sum(map(len, MODEL.values()))
    assert (report["findings"], report["notes"], report["error"], report["files"]) == ([], [], None, len(MODEL))


@pytest.mark.parametrize("how", [[], ["--quick"]], ids=["full", "quick"])
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_mended(model, name, how, copy_of, run_json):
    path = publish(model, MODEL, source=str(copy_of))
    spoil, where, kind = DAMAGES[name]
    spoil(path)
    code, report = run_json(*how)
    assert code == 1
    assert (where, kind) in {(each["path"], each["kind"]) for each in report["findings"]}
    assert {each["path"].split("/")[0] for each in report["findings"]} == {where}

    code, report = run_json(*how, "--repair")
    assert (code, report["findings"], report["error"]) == (0, [], None)
    assert where in {each["path"] for each in report["repaired"]}
    code, report = run_json()
    assert (code, report["repaired"]) == (0, [])
    assert {each: (path / each).read_bytes() for each in MODEL} == MODEL
    assert not (model.own / "repair").exists()


def test_a_wrong_manifest_is_told_with_what_to_do(model, run_json):
    path = publish(model, MODEL)
    (path / MANIFEST).chmod(0o644)
    (path / MANIFEST).write_text("{}")
    code, report = run_json("--repair")
    assert code == 1
    assert "another version of Aerie wrote it" in report["error"]
    assert f"Move {path} away" in report["error"]


def test_a_revision_under_another_name_is_told(model, run_json):
    path = publish(model, MODEL, switch=False)
    path.rename(model.path / SECOND)
    code, report = run_json(f"Model@{SECOND}")
    assert (code, report["revision"]) == (1, SECOND)
    assert f"its manifest is that of revision {FIRST}" in report["error"]


def test_what_was_adopted_without_a_source_says_what_to_do_and_can_be_mended_from_a_copy(model, copy_of, run_json):
    path = publish(model, MODEL)
    damage(path, SHARD, flip)
    code, report = run_json("--repair")
    assert code == 1
    assert "no source is recorded: give one that has the same files" in report["error"]
    assert run_json("--repair", "--source", copy_of)[0] == 0


def test_a_source_with_another_content_mends_nothing(model, copy_of, run_json):
    path = publish(model, MODEL, source=str(copy_of))
    damage(path, SHARD, flip)
    damaged = (path / SHARD).read_bytes()
    (copy_of / SHARD).write_bytes(zeros(MODEL[SHARD]))
    code, report = run_json("--repair")
    assert code == 1
    assert f"another content in segment 0 of {SHARD}" in report["error"]
    (copy_of / SHARD).write_bytes(b"short")
    assert f"another {SHARD} (5 bytes) than the manifest" in run_json("--repair")[1]["error"]
    (copy_of / SHARD).unlink()
    assert f"does not have {SHARD}" in run_json("--repair")[1]["error"]
    shutil.rmtree(copy_of)
    assert "is not there" in run_json("--repair")[1]["error"]
    assert (path / SHARD).read_bytes() == damaged


def test_only_what_is_wrong_is_taken_from_the_source(model, copy_of, run_json, small_segments):
    path = publish(model, MODEL, source=str(copy_of))
    damage(path, SHARD, flip)
    _, report = run_json("--repair")
    (finding,) = report["repaired"]
    assert finding["segments"] == [7]
    assert any(each.startswith(f"{len(MODEL[SHARD]) - 7 * 4096:.3g}"[:3]) for each in report["notes"])


def test_a_quick_look_that_saw_one_wrong_segment_mends_them_all(model, copy_of, run_json, small_segments):
    path = publish(model, MODEL, source=str(copy_of))
    damage(path, SHARD, lambda content: content[: len(content) // 8] + bytes(len(content) - len(content) // 8))
    repaired = []
    while not repaired:  # another sample each time
        code, report = run_json("--quick", "--repair")
        repaired = report["repaired"]
        assert code == 0
    assert run_json()[0] == 0


@pytest.mark.parametrize("how", [[], ["--quick"]], ids=["full", "quick"])
def test_a_file_that_is_only_too_long_needs_no_source(model, how, run_json):
    path = publish(model, MODEL)
    damage(path, SHARD, lambda content: content + b"1")
    damage(path, "empty.txt", lambda _: b"1")
    code, report = run_json("--repair", *how)
    assert code == 0
    assert not [each for each in report["notes"] if "taken from" in each]
    assert run_json()[0] == 0


def test_extra_files_are_moved_aside_and_not_lost(model, copy_of, run_json):
    path = publish(model, MODEL, source=str(copy_of))
    write_files(path, {"notes/mine.txt": b"dear"})
    code, report = run_json("--repair")
    assert code == 0
    (aside,) = (model.own / "aside").rglob("mine.txt")
    assert aside.read_bytes() == b"dear"
    assert str(aside.parents[1]) in report["notes"][0]


def test_what_has_the_damaged_file_open_keeps_it(model, copy_of, run_json):
    path = publish(model, MODEL, source=str(copy_of))
    damage(path, SHARD, flip)
    with (path / SHARD).open("rb") as old:
        assert run_json("--repair")[0] == 0
        assert old.read() == flip(bytearray(MODEL[SHARD]))


def test_what_was_mended_is_not_told_as_it_was_before(model, copy_of, run_json):
    path = publish(model, MODEL, source=str(copy_of))
    damage(path, SHARD, lambda content: content[:-10])
    code, report = run_json("--repair")
    assert (code, report["whole"]) == (0, True)
    assert not [note for note in report["notes"] if "cut off" in note]


def test_each_attempt_of_a_repair_is_told(model, store, capsys, monkeypatch):
    monkeypatch.setattr("aerie.cache.refetch._ATTEMPTS", 2)
    damage(publish(model, MODEL, source="hf:a/b"), SHARD, flip)
    assert run("verify", "--models-dir", store.root, "--repair", "--endpoint", "http://127.0.0.1:9") == 1
    shown = capsys.readouterr()
    assert re.match(r"aerie model verify: http://127\.0\.0\.1:9 does not answer: .*; again in \d s\n", shown.err)
    assert "not repaired: http://127.0.0.1:9 does not answer" in shown.out
    assert "Given up after 2 attempts" in shown.out


@pytest.mark.parametrize("how", [["--quick"], []])
def test_headers_that_never_fitted_are_the_models_own(model, run_json, how):
    odd = MODEL | {"consolidated.safetensors": safetensors({"v": b"1"})}
    publish(model, odd)
    code, report = run_json(*how)
    assert code == 0
    assert report["notes"] == ["as it was fetched: consolidated.safetensors stands beside the shards"]


@pytest.mark.parametrize("how", [["--quick"], []])
def test_shards_that_were_not_chosen_are_not_missed(model, run_json, how):
    publish(model, {name: data for name, data in MODEL.items() if name != SHARD}, options={"exclude": f'["{SHARD}"]'})
    code, report = run_json(*how)
    assert (code, report["notes"]) == (0, [f'some of the model\'s files alone, as it was fetched: exclude ["{SHARD}"]'])


def test_people_read_a_table(model, store, capsys):
    path = publish(model, MODEL)
    damage(path, SHARD, flip)
    (path / "config.json").unlink()
    assert run("verify", "--models-dir", store.root) == 1
    shown = capsys.readouterr().out
    assert f"Model@{FIRST}: 2 paths are wrong (8 files, " in shown
    assert f"  config.json                       missing  54 bytes\n  {SHARD}  altered  its only segment\n" in shown


def test_what_is_no_file_of_the_model_is_not_counted_as_one(model, store, capsys):
    path = publish(model, {"config.json": b"{}"})
    path.chmod(0o700)
    (path / "extra").write_bytes(b"")
    assert run("verify", "--models-dir", store.root) == 1
    assert f"Model@{FIRST}: 2 paths are wrong (1 file, 2 B; " in capsys.readouterr().out
    (path / "extra").unlink()
    assert run("verify", "--models-dir", store.root) == 1
    assert f"Model@{FIRST}: 1 path is wrong (1 file, " in capsys.readouterr().out


def test_segments_are_said_to_be_counted_from_0(model, run_json, small_segments):
    path = publish(model, {"one": bytes(5000), "more": bytes(20000), "only": b"1"})
    for name in ("one", "only"):
        damage(path, name, lambda content: content[:-1] + b"2")
    damage(path, "more", lambda _: b"1" * 20000)
    _, report = run_json()
    assert {each["path"]: each["detail"] for each in report["findings"]} == {
        "one": "segment 1, counted from 0, of 2",
        "more": "segments 0-4, counted from 0, of 5",
        "only": "its only segment",
    }


def test_a_choice_of_a_models_files_is_told(model, store, run_json, capsys):
    publish(model, CONTENT, source="hf:someone/Model", options={"include": '["*.json"]', "endpoint": "https://x"})
    code, report = run_json()
    assert (code, report["notes"]) == (0, ['some of the model\'s files alone, as it was fetched: include ["*.json"]'])
    assert run("list", "--models-dir", store.root) == 0
    assert 'hf:someone/Model, some files alone: include ["*.json"]' in capsys.readouterr().out
    assert run("list", "--models-dir", store.root, "--json") == 0
    (listed,) = json.loads(capsys.readouterr().out)["models"]
    assert listed["revisions"][0]["chosen"] == {"include": '["*.json"]'}


def test_a_revision_is_named_by_its_place_and_another_name_in_its_manifest_is_told(model, store, capsys):
    publish(model, CONTENT)
    other = store.model("Other")
    shutil.copytree(model.path, other.path, symlinks=True)
    assert run("verify", "--models-dir", store.root) == 0
    first, second, note = capsys.readouterr().out.splitlines()
    assert first.startswith(f"Model@{FIRST}: whole")
    assert second.startswith(f"Other@{FIRST}: whole")
    assert note == "  its manifest is that of a model Model: it was copied, or renamed, by hand"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["Nobody"], 1, "there is no model Nobody in .*; there are Model"),
        (["Nobody", "--all"], 1, "there is no model Nobody in .*; there are Model"),
        (["Model", "MODEL"], 1, "there is no model MODEL in .*: is Model meant"),
        (["Model@" + SECOND], 1, f"Model@{SECOND} is not published in .*: there are {FIRST}"),
        (["Model@111111"], 1, f"Model@111111 is too short, 7 digits are needed: there are {FIRST}"),
        (["Model@22"], 1, "Model@22 is not published in"),
        (["Model@previous"], 1, "Model has no previous revision"),
        (["../Model"], 2, "is no name for a model"),
        (["Model@"], 1, "is not published"),
        (["--models-dir", "/nonexistent"], 1, "/nonexistent cannot be read: No such file"),
    ],
)
def test_what_is_not_there_is_told(model, store, arguments, code, message, capsys):
    publish(model, MODEL)
    assert run("verify", "--models-dir", store.root, *arguments) == code
    assert re.search(message, capsys.readouterr().err)


def spoil_current(model):
    (model.path / "current").unlink()
    (model.path / "current").mkdir()


AMISS = {
    "its revision is gone": (
        lambda model: shutil.rmtree(model.path / FIRST),
        f"current points to {FIRST}, which is not there, nor is any other revision of it: fetch or adopt it again",
        1,
    ),
    "its revision is gone, and so is what is Aerie's own": (
        lambda model: [shutil.rmtree(model.path / each) for each in (FIRST, ".aerie")],
        f"current points to {FIRST}, which is not there",
        1,
    ),
    "current is a directory": (spoil_current, "current is no symlink, expected a symlink to a revision", 1),
    "current leads out": (
        lambda model: [(model.path / "current").unlink(), (model.path / "current").symlink_to("/data")],
        "current points to '/data', expected a symlink to a revision",
        1,
    ),
    "none was ever in service": (
        lambda model: (model.path / "current").unlink(),
        "no revision of it is in service: this is the newest",
        0,
    ),
    "none was ever in service, and the newest is damaged": (
        lambda model: [(model.path / "current").unlink(), damage(model.path / FIRST, "config.json", zeros)],
        "config.json  altered",
        1,
    ),
}


@pytest.mark.parametrize("named", [[], ["Amiss", "Other"]], ids=["all", "named"])
@pytest.mark.parametrize("case", AMISS)
def test_a_model_with_nothing_in_service_is_told_and_hides_no_other(store, case, named, capsys):
    spoil, told, code = AMISS[case]
    publish(store.model("Amiss"), CONTENT)
    path = publish(store.model("Other"), CONTENT, SECOND)
    spoil(store.model("Amiss"))
    for how in ([], ["--quick"]):
        assert run("verify", "--models-dir", store.root, *how, *named) == code
        shown = capsys.readouterr().out
        assert shown.startswith("Amiss")
        assert told in shown
        assert f"Other@{SECOND}: whole" in shown
    damage(path, "config.json", flip_first)
    assert run("verify", "--models-dir", store.root, *named) == 1
    assert "config.json  altered" in capsys.readouterr().out


def test_every_revision_is_looked_at_where_the_current_one_is_gone(model, store, capsys):
    publish(model, CONTENT)
    shutil.rmtree(publish(model, CONTENT, SECOND))
    assert run("verify", "--models-dir", store.root, "--all", "--json") == 1
    amiss, whole = json.loads(capsys.readouterr().out)["revisions"]
    assert (amiss["revision"], amiss["whole"], amiss["path"]) == (None, False, str(model.path))
    assert f"there are {FIRST}: `aerie model rollback Model REVISION` lets one be current" in amiss["error"]
    assert (whole["revision"], whole["whole"]) == (FIRST, True)


def test_what_was_never_published_is_no_failure_unless_it_is_named(model, store, capsys):
    publish(store.model("Other"), CONTENT)
    with model.lock("test"):
        model.staging(FIRST)
    assert run("verify", "--models-dir", store.root) == 0
    assert "Model" not in capsys.readouterr().out
    assert run("verify", "--models-dir", store.root, "Model", "Other") == 1
    shown = capsys.readouterr().out
    assert "Model: cannot be verified\n  no revision of it is published" in shown
    assert "Other@" in shown


def test_who_is_named_twice_is_verified_once(model, store, capsys):
    publish(model, CONTENT)
    assert run("verify", "--models-dir", store.root, "Model", "Model", f"Model@{FIRST[:8]}") == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_an_empty_store_has_nothing_to_verify(store, capsys):
    assert run("verify", "--models-dir", store.root) == 1
    assert "nothing is published" in capsys.readouterr().err


def test_a_repair_waits_for_nobody_and_a_look_does_not_mind_who_holds_it(model, store, capsys):
    path = publish(model, MODEL)
    with hold(path), model.lock("aerie model fetch"):
        assert run("verify", "--models-dir", store.root) == 0
        assert run("verify", "--models-dir", store.root, "--repair") == 0
        (path / "config.json").unlink()
        assert run("verify", "--models-dir", store.root, "--repair") == 1
    assert "not repaired: Model is being worked on by `aerie model fetch`" in capsys.readouterr().out


def test_a_revision_can_be_named_in_short(model, store, run_json):
    publish(model, MODEL)
    publish(model, MODEL, SECOND)
    assert run_json("Model@1111111")[1]["revision"] == FIRST
    assert run_json("Model@previous")[1]["revision"] == FIRST
    assert run_json("Model")[1]["revision"] == SECOND


@pytest.mark.parametrize("spoil", [lambda path: (path / SHARD).unlink(), lambda path: damage(path, SHARD, flip)])
def test_what_another_revision_has_is_taken_from_there(model, run_json, spoil):
    """Adopted, so that there is no source; and the one of three that has the file whole is the last."""
    first, second, third = (publish(model, MODEL, each, switch=False) for each in (FIRST, SECOND, "3" * 40))
    damage(third, SHARD, flip)
    spoil(second)
    code, report = run_json(f"Model@{SECOND}", "--repair")
    assert (code, report["error"]) == (0, None)
    assert f"{SHARD} taken from {first / SHARD}" in report["notes"]
    assert (second / SHARD).read_bytes() == MODEL[SHARD]
    assert (third / SHARD).read_bytes() == flip(bytearray(MODEL[SHARD]))


def test_what_was_put_aside_before_is_not_written_over(model, copy_of, run_json, monkeypatch):
    path = publish(model, MODEL, source=str(copy_of))
    monkeypatch.setattr("aerie.cache.repair.time.strftime", lambda text, _: text)
    for content in (b"first", b"second"):
        write_files(path, {"notes.txt": content})
        assert run_json("--repair")[0] == 0
    assert {each.read_bytes() for each in (model.own / "aside").rglob("notes.txt")} == {b"first", b"second"}


def test_a_repair_that_is_ended_fetches_no_more(model, store, small_segments, monkeypatch):
    """Ctrl-C while segments come slowly: not one piece more of each, let alone all of them."""
    path = publish(model, MODEL, source="slow")
    damage(path, SHARD, zeros)
    ended, came = threading.Event(), []

    class Slow:
        description = "slow"

        def list(self):
            return Listing(tuple(Offer(name, len(data)) for name, data in MODEL.items()), None)

        def read(self, offer, start, end):
            for at in range(start, end):
                came.append(at)
                if len(came) == 20:
                    ended.set()
                    os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)
                yield MODEL[offer.path][at : at + 1]

        def close(self):
            pass

    monkeypatch.setattr("aerie.cache.refetch.open_source", lambda *_, **__: Slow())
    began = time.monotonic()
    assert run("verify", "--models-dir", store.root, "--repair") == 130
    assert time.monotonic() - began < 5
    assert ended.is_set()


def test_an_extra_files_name_comes_to_no_terminal(model, store, capsys):
    path = publish(model, MODEL)
    (path / os.fsdecode(b"odd\x1b[2J\xff")).write_bytes(b"")
    assert run("verify", "--models-dir", store.root) == 1
    shown = capsys.readouterr().out
    assert "odd\\x1b[2J\\udcff" in shown
    assert "\x1b" not in shown
