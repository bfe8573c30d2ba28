"""The Hub's token: from a file, the environment, or where `hf auth login` keeps it."""

import logging
import os
import stat
from pathlib import Path

from aerie.cache.sources.source import SourceError

_LONGEST = 4096

_log = logging.getLogger("aerie")


def find_token(file: Path | None) -> str | None:
    """Return the token, None where there is none; raises SourceError where it is none.

    It must be what a header takes, since the errors of libraries repeat a header that is none.
    """
    if file is not None:
        try:
            with file.open("rb") as stream:
                mode = os.fstat(stream.fileno()).st_mode
                token = stream.read(_LONGEST + 1).decode("ascii", errors="replace").strip()
        except OSError as error:
            raise SourceError(f"the token's file {file} cannot be read: {error.strerror}") from None
        if not _is_token(token):
            raise SourceError(f"the token's file {file} holds no token: expected one line such as hf_...")
        if stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH):
            _log.warning("others can read the token's file %s: chmod 600 %s", file, file)
        return token
    if token := os.environ.get("HF_TOKEN", "").strip():
        if not _is_token(token):
            raise SourceError("HF_TOKEN holds no token: expected one word such as hf_...")
        return token
    from huggingface_hub import get_token  # noqa: PLC0415

    kept = get_token()
    if kept is not None and not _is_token(kept):
        raise SourceError("what `hf auth login` keeps is no token: run it again, or give --token-file")
    return kept


def _is_token(text: str) -> bool:
    return 0 < len(text) <= _LONGEST and all("!" <= each <= "~" for each in text)
