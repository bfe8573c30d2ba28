"""What the headers of a checkpoint's files say, and what can be wrong with them."""

from __future__ import annotations

import json
import os

import pytest
from sparse_checkpoint import write_shard, write_sparse

from aerie.checkpoint.files import INDEX, Tensor, read_weights
from aerie.checkpoint.layout import Expected

LAYOUT = {
    "a.weight": Expected("BF16", (4, 8)),
    "b.weight_packed": Expected("I32", (2, 3)),
    "c.bias": Expected("F32", (5,)),
}
SHARDS = {"a.weight": 1, "b.weight_packed": 2, "c.bias": 3}
FIRST, SECOND, THIRD = (f"model-{number:05}-of-000003.safetensors" for number in (1, 2, 3))


@pytest.fixture
def checkpoint(tmp_path):
    write_sparse(tmp_path, LAYOUT, SHARDS.__getitem__)
    return tmp_path


def faults(directory):
    return [(fault.text, fault.fatal) for fault in read_weights(directory).faults]


def test_a_whole_checkpoint(checkpoint):
    weights = read_weights(checkpoint)
    assert weights.faults == ()
    assert weights.tensors["b.weight_packed"] == Tensor("I32", (2, 3), SECOND, 24)
    assert weights.size == 64 + 24 + 20


def test_what_it_reads_is_what_safetensors_writes(checkpoint):
    """A file of the format's own description, byte for byte, metadata included."""
    header = b'{"__metadata__":{"format":"pt"},"x":{"dtype":"F16","shape":[1,2],"data_offsets":[0,4]}}   '
    (checkpoint / FIRST).write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0\0")
    assert read_weights(checkpoint).tensors["x"] == Tensor("F16", (1, 2), FIRST, 4)


def test_a_single_file_needs_no_index(tmp_path):
    write_shard(tmp_path / "model.safetensors", LAYOUT)
    assert faults(tmp_path) == []


def test_missing_shards_are_counted_and_named(checkpoint):
    (checkpoint / SECOND).unlink()
    (checkpoint / THIRD).unlink()
    assert faults(checkpoint) == [(f"2 of 3 shards are missing: {SECOND}, {THIRD}", True)]


def test_missing_shards_are_noticed_without_an_index_too(checkpoint):
    (checkpoint / SECOND).unlink()
    (checkpoint / INDEX).unlink()
    assert faults(checkpoint) == [
        (f"1 of 3 shards are missing: {SECOND}", True),
        (f"{INDEX} is missing", False),
    ]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda whole: whole[:-7], "is cut off: {cut} bytes of {whole}"),
        (lambda whole: whole + b"x", "is longer than its header says: {cut} bytes of {whole}"),
        (lambda whole: whole[:40], "is cut off within its header: 40 bytes of at least "),
        (lambda _: b"", "is no safetensors file: 0 bytes that begin with b''"),
        (lambda _: b"PK\3\4" + bytes(60), "is no safetensors file: 64 bytes that begin with b'PK"),
        (lambda _: b"version https://git-lfs.github.com/spec/v1\noid", "is a Git LFS pointer of 46 bytes"),
        (lambda whole: whole.replace(b'"a.weight"', b'"a.weight:'), "has a header that is not safetensors' "),
        (lambda whole: whole.replace(b'"BF16"', b'"F32" '), "gives a.weight 64 bytes, and F32 [4, 8] takes others"),
        (lambda whole: whole.replace(b"[0, 64]", b"[2, 66]"), "is cut off|overlap or leave a gap"),
    ],
)
def test_a_broken_file_is_told_with_its_sizes(checkpoint, spoil, said):
    path = checkpoint / FIRST
    whole = path.read_bytes()
    path.write_bytes(spoil(whole))
    told = [text for text, fatal in faults(checkpoint) if fatal]
    assert len(told) == 1
    assert told[0].startswith(FIRST)
    wanted = said.format(cut=path.stat().st_size, whole=len(whole))
    assert any(part in told[0] for part in wanted.split("|")), told


def test_a_dtype_that_is_new_has_no_size_to_compare(checkpoint):
    path = checkpoint / FIRST
    path.write_bytes(path.read_bytes().replace(b"BF16", b"F4_X"))
    assert faults(checkpoint) == []


def test_a_tensor_twice(checkpoint):
    write_shard(checkpoint / THIRD, {"a.weight": LAYOUT["a.weight"], "c.bias": LAYOUT["c.bias"]})
    assert (f"a.weight in both {FIRST} and {THIRD}", True) in faults(checkpoint)


def test_index_and_headers_of_two_versions(checkpoint):
    write_shard(checkpoint / THIRD, {"d.bias": LAYOUT["c.bias"]})
    assert faults(checkpoint) == [
        (f"{INDEX} has c.bias in {THIRD}, whose header does not", True),
        (f"{INDEX} lacks d.bias, which {THIRD} has", True),
    ]


def test_files_that_are_not_of_the_checkpoint(checkpoint):
    write_shard(checkpoint / "consolidated.safetensors", {"x": LAYOUT["c.bias"]})
    write_shard(checkpoint / "adapter.safetensors", {"y": LAYOUT["c.bias"]})
    assert faults(checkpoint) == [
        ("consolidated.safetensors stands beside the shards", True),
        (f"adapter.safetensors is not in {INDEX}", False),
    ]


def test_no_weights_at_all(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert faults(tmp_path) == [(f"no *.safetensors file is in {tmp_path}", True)]


def test_an_index_whose_shards_are_all_missing(checkpoint):
    for path in checkpoint.glob("*.safetensors"):
        path.unlink()
    ((text, fatal),) = faults(checkpoint)
    assert text.startswith("3 of 3 shards are missing: ")
    assert fatal


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a"'])
def test_a_broken_index(checkpoint, content):
    (checkpoint / INDEX).write_text(content)
    assert any(text.startswith(f"{INDEX} is not an index") and fatal for text, fatal in faults(checkpoint))


def test_many_names_are_shortened(tmp_path):
    layout = {f"{letter}.weight": Expected("BF16", (2,)) for letter in "abcdefgh"}
    write_sparse(tmp_path, layout, lambda name: ord(name[0]) - ord("a") + 1)
    for path in list(tmp_path.glob("*.safetensors"))[1:]:
        path.unlink()
    (text, _), *_ = faults(tmp_path)
    assert text.startswith("7 of 8 shards are missing: ")
    assert text.endswith(" and 4 more")


def test_a_directory_that_is_none(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_weights(tmp_path / "nowhere")


def test_the_index_may_lie_elsewhere_in_its_total(checkpoint):
    """total_size is no fault: published indexes count it in more than one way."""
    index = json.loads((checkpoint / INDEX).read_text())
    index["metadata"]["total_size"] = 1
    (checkpoint / INDEX).write_text(json.dumps(index))
    assert faults(checkpoint) == []


@pytest.mark.parametrize("name", ["z.safetensors", FIRST, INDEX])
def test_a_pipe_is_not_waited_for(checkpoint, name):
    (checkpoint / name).unlink(missing_ok=True)
    os.mkfifo(checkpoint / name)
    assert (f"{name} cannot be read: it is no regular file", True) in faults(checkpoint)


def test_nesting_without_end(checkpoint):
    (checkpoint / INDEX).write_text("[" * 100_000)
    assert any(text.startswith(f"{INDEX} is not an index") for text, _ in faults(checkpoint))
    header = b'{"a":' * 100_000
    (checkpoint / FIRST).write_bytes(len(header).to_bytes(8, "little") + header)
    assert any(text.startswith(f"{FIRST} has a header that is not safetensors'") for text, _ in faults(checkpoint))
