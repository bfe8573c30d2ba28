"""Which names a store takes, whatever a source offers."""

import os
import string
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aerie.cache.names import NameRefusedError, check_files, check_model, check_revision, model_of

PARTS = st.text(string.ascii_letters + string.digits + "._- é漢", min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["../escape"], "does not stay"),
        (["a/../../escape"], "does not stay"),
        (["/etc/passwd"], "does not stay"),
        (["a//b"], "does not stay"),
        (["a/"], "does not stay"),
        (["./a"], "does not stay"),
        ([""], "does not stay"),
        (["."], "does not stay"),
        (["a\\..\\b"], "does not stay"),
        (["C:\\windows"], "does not stay"),
        (["a\0b"], "characters that are not shown"),
        (["a\nb"], "characters that are not shown"),
        (["a\x1b[2Jb"], "characters that are not shown"),
        (["a\u202eb"], "characters that are not shown"),
        (["a\ud800b"], "characters that are not shown"),
        (["a" * 256], "too long"),
        (["漢" * 86], "too long"),
        (["/".join(["a" * 200] * 6)], "too long"),
        (["aerie-manifest.json"], "Aerie's own"),
        (["aerie-manifest.json.new"], "Aerie's own"),
        (["AERIE-manifest.json"], "Aerie's own"),
        (["aerie-manifest.json/x"], "Aerie's own"),
        (["a", "a"], "twice"),
        (["Model.bin", "model.bin"], "differ by case alone"),
        (["caf\u00e9", "cafe\u0301"], "differ by case"),
        (["stra\u00dfe", "strasse"], "differ by case"),
        (["A/x", "a/y"], "'A' and 'a' differ by case"),
        (["a/B/x", "a/b/y"], "'a/B' and 'a/b' differ by case"),
        (["a", "a/b"], "a file and a directory at once"),
        (["a", "A/b"], "'A' and 'a' differ by case"),
    ],
)
def test_what_must_not_be_written_is_refused(names, message):
    with pytest.raises(NameRefusedError, match=message):
        check_files(names)


@pytest.mark.parametrize(
    "names",
    [
        ["config.json", "model-00001-of-00064.safetensors", "tokenizer/vocab.json", ".gitattributes"],
        ["docs/aerie-manifest.json", "a b.txt", "漢字.json", "x" * 255, "..a", "a..", "..."],
    ],
)  # fmt: skip
def test_what_models_have_is_taken(names):
    check_files(names)


@given(st.lists(st.lists(PARTS, min_size=1, max_size=4).map("/".join), max_size=8))
@example(["..", "a"])
def test_what_is_taken_can_be_written_each_to_a_file_of_its_own_in_the_directory(tmp_path_factory, names):
    try:
        check_files(names)
    except NameRefusedError:
        return
    root = tmp_path_factory.mktemp("root")
    for name in names:
        path = root / name
        assert Path(os.path.normpath(path)).is_relative_to(root)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    assert {name: (root / name).read_text() for name in names} == {name: name for name in names}


@given(st.text(max_size=30))
def test_a_models_name_is_one_part_of_a_path_or_refused(name):
    try:
        check_model(name)
    except NameRefusedError as error:
        assert "is no name for a model" in str(error)  # noqa: PT017
        return
    assert len(Path(name).parts) == 1
    assert not name.startswith((".", "-"))
    assert name.isascii()


@pytest.mark.parametrize("name", ["Kimi-K2.5", "a", "0_x", "a" * 96])
def test_names_of_models_are_taken(name):
    assert check_model(name) == name


@pytest.mark.parametrize("name", ["current\n", "Kimi\n", "a" * 97])
def test_names_of_models_end_where_they_end(name):
    with pytest.raises(NameRefusedError):
        check_model(name)


@pytest.mark.parametrize(
    "revision", ["a" * 39, "a" * 41, "A" * 40, "g" * 40, "a" * 40 + "\n", "", "main", "\u0661" * 40]
)
def test_what_is_no_revision_is_refused(revision):
    with pytest.raises(NameRefusedError, match="40 hexadecimal digits"):
        check_revision(revision)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/data/models/Kimi", "Kimi"),
        ("/data/models/Kimi/current", "Kimi"),
        ("/data/models/Kimi/previous", "Kimi"),
        (f"/data/models/Kimi/{'0' * 40}", "Kimi"),
        ("/current", "current"),
    ],
)
def test_a_directory_has_its_models_name(path, name):
    assert model_of(Path(path)) == name
