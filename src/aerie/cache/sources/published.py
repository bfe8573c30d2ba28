"""A revision that Aerie published, wherever it lies: its manifest says what is there. Pure."""

from collections.abc import Iterable, Mapping

from aerie.cache.manifest import MANIFEST, Manifest, ManifestError, read_manifest
from aerie.cache.sources.source import Listing, Offer, SourceError

_SHOWN = 5
LARGEST_MANIFEST = 64 * 2**20
"""Bytes; that of 595 GB has one."""

NOT_THE_MODELS = (".git", ".cache/huggingface", "lost+found", ".aerie")
"""Of `git clone`, of `hf download --local-dir`, of the file system, of Aerie's own work in a model's directory."""


def is_models(name: str) -> bool:
    """Return whether a file or directory is part of a model, and not what tools leave beside it."""
    return not any(name == each or name.startswith(f"{each}/") for each in NOT_THE_MODELS)


def why_no_model(where: str, names: Iterable[str]) -> str | None:
    """Return why what has these files is several models, and no model; None where it may be one."""
    inner = sorted({name.partition("/")[0] for name in names if name.endswith(f"/{MANIFEST}")})
    if not inner:
        return None
    more = " and more" if len(inner) > _SHOWN else ""
    return (
        f"{where} is no model: it holds what Aerie has published in {', '.join(inner[:_SHOWN])}{more}. Give one of "
        f"them, such as {where.rstrip('/')}/{inner[0]}"
    )


def within(names: Iterable[str], where: str, revision: str | None) -> str:
    """Return what the names of the wanted revision's files begin with: nothing, or a part and `/`.

    A model's whole directory, copied elsewhere, has its revisions as folders, and `current` as one where the copying
    followed links. Raises SourceError where it cannot be told which is wanted.
    """
    names = set(names)
    inner = {name.removesuffix(f"/{MANIFEST}") for name in names if name.endswith(f"/{MANIFEST}")}
    inner = {name for name in inner if "/" not in name}
    if MANIFEST in names or not inner:
        return ""
    for wanted in (revision,) if revision is not None else ("current", *(inner if len(inner) == 1 else ())):
        if wanted in inner:
            return f"{wanted}/"
    if revision is None:
        raise SourceError(f"{where} has several revisions ({', '.join(sorted(inner))}): give one of them as --revision")
    raise SourceError(f"{where} has no revision {revision}; it has {', '.join(sorted(inner))}")


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
    return Listing(tuple(_offers(manifest, where, found)), manifest.revision, manifest.chosen)


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
