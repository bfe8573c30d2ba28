"""A revision that Aerie published, wherever it lies: its manifest says what is there. Pure."""

from collections.abc import Mapping

from aerie.cache.manifest import Manifest, ManifestError, read_manifest
from aerie.cache.sources.source import Listing, Offer, SourceError

LARGEST_MANIFEST = 64 * 2**20
"""Bytes; that of 595 GB has one."""


def published(text: str, where: str, found: Mapping[str, tuple[int, str]], revision: str | None) -> Listing:
    """Return what the manifest in `text` lists, with its digests; `found` has each file's size and version.

    Raises SourceError where the manifest cannot be used, is another revision's than the one asked for, or does not
    fit what was found. Files that it does not list are none of the model's.
    """
    try:
        manifest = read_manifest(text)
    except ManifestError as error:
        raise SourceError(f"{where} has an aerie-manifest.json that cannot be used: {error}") from None
    if revision is not None and revision != manifest.revision:
        raise SourceError(
            f"{where} holds revision {manifest.revision} of {manifest.name}, and {revision} was asked for: "
            "leave --revision out to take what is there"
        )
    return Listing(tuple(_offers(manifest, where, found)), manifest.revision)


def _offers(manifest: Manifest, where: str, found: Mapping[str, tuple[int, str]]) -> list[Offer]:
    offers = []
    for file in manifest.files:
        if file.path not in found:
            raise SourceError(f"{where} lacks {file.path}, which its manifest lists: {_REPAIR}")
        size, version = found[file.path]
        if size != file.size:
            raise SourceError(f"{where}: {file.path} has {size} bytes, and {file.size} by its manifest: {_REPAIR}")
        offers.append(Offer(file.path, file.size, sha256=file.sha256, version=version))
    return offers


_REPAIR = "it is damaged; run `aerie model verify --repair` where it lies, or take another source"
