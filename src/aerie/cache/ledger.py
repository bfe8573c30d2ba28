"""How far each segment of a fetch is, in one small file that survives kill -9 and power loss.

It is written in place with pwrite, after what it tells of: a process that is killed leaves it in the page cache with
the data, so `written` holds for as long as the machine runs. After a crash of the machine only `durable` counts, which
is set once the data was synchronised. (A mapping of it would do the same, but end the process by SIGBUS where a disk is
full or broken; pwrite says so.) The file has its full size from the beginning, and needs no room later.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.cache.manifest import SEGMENT, File, segment_count
from aerie.cache.sources.source import Offer

_MAGIC = b"AERIELG1"
_HEAD = struct.Struct("<8sQI")  # magic, bytes of the JSON text that follows, CRC-32 of it
_SEGMENT = struct.Struct("<II32s")  # written, durable, SHA-256
_COUNTS = struct.Struct("<II")
_FILE = struct.Struct("<QQQQ32sI")  # size, mtime_ns, ctime_ns, inode, SHA-256, CRC-32 of it all with the segments'
_LARGEST = 256 * 2**20
"""Bytes; no ledger comes near it."""
_DAMAGES = (ValueError, KeyError, TypeError, IndexError, struct.error, RecursionError)
"""What reading something that is no ledger raises."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a file's status tells of its content: it changes whenever somebody writes to it."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Identity":
        """Return that of a file with this status."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


@dataclass(slots=True)
class _Proof:
    identity: Identity
    sha256: str
    segments: tuple[str, ...]


def boot_id() -> str:
    """Return what names this boot of the machine; raises OSError where the kernel does not tell."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class Ledger:
    """The progress of a listing's files; one thread at a time touches a segment, any the rest."""

    def __init__(self, path: Path, offers: Sequence[Offer], boot: str, *, only_look: bool = False) -> None:
        """Open or begin the ledger at `path` for these files. Raises OSError.

        What is there of the same boot and listing goes on as it is; of another boot, from what is durable; of another
        listing, for the files that are the same in both. What is no ledger is renamed to `ledger.damaged`. Who wants
        `only_look` changes nothing, gets no error, and asks for what was written alone.
        """
        self._offers = tuple(offers)
        self._path = path
        self.first: list[int] = []
        """For each file the number of its first segment."""
        total = 0
        for offer in self._offers:
            self.first.append(total)
            total += segment_count(offer.size)
        self._reset(total)
        header = {"boot": boot, "files": [_described(offer) for offer in self._offers]}
        text = json.dumps(header, separators=(",", ":")).encode()
        self._start = _HEAD.size + len(text)
        self.damaged = False
        """Whether there was something that is no ledger."""
        if only_look:
            try:
                self._read(self._content(), header)
            except (OSError, *_DAMAGES):
                self._reset(total)
            return
        same = self._take_over(header)
        if not same:
            self._replace(text)
        self._descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)

    def _reset(self, total: int) -> None:
        self._written = [0] * total
        self._durable = [0] * total
        self._proofs: list[_Proof | None] = [None] * len(self._offers)

    def written(self, segment: int) -> int:
        """Return how many bytes of a segment are in the file, from its beginning."""
        return self._written[segment]

    def file_written(self, number: int) -> int:
        """Return how many bytes of a file are there."""
        return sum(self._written[index] for index in self.segments(number))

    def segments(self, number: int) -> range:
        """Return the numbers of a file's segments."""
        return range(self.first[number], self.first[number] + segment_count(self._offers[number].size))

    def note_written(self, segment: int, count: int) -> None:
        """Record that `count` bytes of a segment are in the file. Raises OSError."""
        self._written[segment] = count
        self._put_counts(segment)

    def counts(self, number: int) -> list[int]:
        """Return `written` of each of a file's segments, to be given to note_durable once the file is synchronised."""
        return [self._written[index] for index in self.segments(number)]

    def note_durable(self, number: int, counts: Sequence[int]) -> None:
        """Record that a file was synchronised after these counts were taken. Raises OSError."""
        for index, count in zip(self.segments(number), counts, strict=True):
            # One that was begun anew meanwhile has less.
            if self._durable[index] < count <= self._written[index]:
                self._durable[index] = count
                self._put_counts(index)

    def distrust(self, number: int) -> None:
        """Count of a file what is durable alone: the rest may be in no page cache, either. Raises OSError."""
        self._proofs[number] = None
        self._pwrite(bytes(_FILE.size), self._file_offset(number))
        for index in self.segments(number):
            self._written[index] = self._durable[index]
            self._put_counts(index)

    def forget(self, number: int) -> None:
        """Begin a file anew. Raises OSError."""
        self._proofs[number] = None
        self._pwrite(bytes(_FILE.size), self._file_offset(number))
        for index in self.segments(number):
            self._written[index] = self._durable[index] = 0
            self._put_counts(index)

    def note_verified(self, number: int, identity: Identity, sha256: str, segments: Sequence[str]) -> None:
        """Record the digests of a file that is right and was synchronised. Raises OSError."""
        proof = _Proof(identity, sha256, tuple(segments))
        self._proofs[number] = proof
        for index, digest in zip(self.segments(number), segments, strict=True):
            self._pwrite(bytes.fromhex(digest), self._start + index * _SEGMENT.size + _COUNTS.size)
        self._pwrite(_packed(proof), self._file_offset(number))

    def verified(self, number: int, status: os.stat_result) -> File | None:
        """Return the file as it was proven, unless its status says that it was touched since, or it never was."""
        proof, offer = self._proofs[number], self._offers[number]
        if proof is None or proof.identity != Identity.of(status):
            return None
        return File(offer.path, offer.size, proof.sha256, proof.segments)

    def sync(self) -> None:
        """Make it survive a crash of the machine. Raises OSError."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file, not synchronised."""
        os.close(self._descriptor)

    def _take_over(self, header: dict[str, Any]) -> bool:
        """Read what is there; return whether it can be gone on with in place."""
        try:
            content = self._content()
        except FileNotFoundError:
            return False
        except OSError:  # a symbolic link, a directory, a broken sector
            self._set_aside()
            return False
        try:
            return self._read(content, header)
        except _DAMAGES:
            self._reset(len(self._written))
            self._set_aside()
            return False

    def _content(self) -> bytes:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            return file.read(_LARGEST)

    def _read(self, content: bytes, header: dict[str, Any]) -> bool:
        magic, length, check = _HEAD.unpack_from(content)
        text = content[_HEAD.size : _HEAD.size + length]
        if magic != _MAGIC or len(text) != length or zlib.crc32(text) != check:
            raise ValueError("no ledger, or one that is damaged")
        found = json.loads(text)
        same_boot = found["boot"] == header["boot"]
        old = [Offer(*each) for each in found["files"]]
        segments = sum(segment_count(offer.size) for offer in old)
        start = _HEAD.size + length
        files = start + segments * _SEGMENT.size
        if len(content) != files + len(old) * _FILE.size:
            raise ValueError("the ledger was cut")
        mine = {offer.path: number for number, offer in enumerate(self._offers)}
        first = 0
        for position, offer in enumerate(old):
            count = segment_count(offer.size)
            number = mine.get(offer.path)
            if number is not None and _same(offer, self._offers[number]):
                digests = []
                for index in range(count):
                    written, durable, digest = _SEGMENT.unpack_from(content, start + (first + index) * _SEGMENT.size)
                    if max(written, durable) > min(SEGMENT, offer.size - index * SEGMENT):
                        raise ValueError("more of a segment is written than there is")
                    mark = self.first[number] + index
                    self._written[mark] = written if same_boot else min(durable, written)
                    self._durable[mark] = min(durable, written)
                    digests.append(digest.hex())
                self._proofs[number] = _proof(content[files + position * _FILE.size :][: _FILE.size], digests)
            first += count
        return bool(found == header)

    def _set_aside(self) -> None:
        self.damaged = True
        self._path.replace(self._path.with_name("ledger.damaged"))

    def _replace(self, text: bytes) -> None:
        draft = self._path.with_name("ledger.new")
        draft.unlink(missing_ok=True)
        body = bytearray(_HEAD.pack(_MAGIC, len(text), zlib.crc32(text)) + text)
        for number in range(len(self._offers)):
            proof = self._proofs[number]
            for position, index in enumerate(self.segments(number)):
                digest = bytes.fromhex(proof.segments[position]) if proof else bytes(32)
                body += _SEGMENT.pack(self._written[index], self._durable[index], digest)
        for proof in self._proofs:
            body += _packed(proof) if proof else bytes(_FILE.size)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(body)
                file.flush()
                os.fsync(descriptor)
            draft.replace(self._path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        parent = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)

    def _put_counts(self, segment: int) -> None:
        self._pwrite(
            _COUNTS.pack(self._written[segment], self._durable[segment]), self._start + segment * _SEGMENT.size
        )

    def _file_offset(self, number: int) -> int:
        return self._start + len(self._written) * _SEGMENT.size + number * _FILE.size

    def _pwrite(self, content: bytes, offset: int) -> None:
        os.pwrite(self._descriptor, content, offset)


def _described(offer: Offer) -> list[Any]:
    return [offer.path, offer.size, offer.sha256, offer.git_sha1, offer.version]


def _same(old: Offer, new: Offer) -> bool:
    """Return whether two offers of one path promise the same content."""
    if old.size != new.size:
        return False
    if old.sha256 or new.sha256:
        return old.sha256 == new.sha256
    if old.git_sha1 or new.git_sha1:
        return old.git_sha1 == new.git_sha1
    return old.version == new.version


def _check(fields: bytes, segments: Iterable[str]) -> int:
    # 0 is what a record that was never written has.
    return zlib.crc32(b"".join([fields, *map(bytes.fromhex, segments)])) or 1


def _packed(proof: _Proof) -> bytes:
    identity = proof.identity
    fields = (identity.size, identity.mtime_ns, identity.ctime_ns, identity.inode, bytes.fromhex(proof.sha256))
    return _FILE.pack(*fields, _check(_FILE.pack(*fields, 0), proof.segments))


def _proof(record: bytes, segments: Sequence[str]) -> _Proof | None:
    *numbers, sha256, check = _FILE.unpack(record)
    if not check or check != _check(_FILE.pack(*numbers, sha256, 0), segments):
        return None
    return _Proof(Identity(*numbers), sha256.hex(), tuple(segments))
