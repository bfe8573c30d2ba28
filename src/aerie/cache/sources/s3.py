"""Weights from a bucket of S3, or of a store that speaks its language."""

import base64
import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

from aerie.cache.manifest import MANIFEST
from aerie.cache.sources.published import LARGEST_MANIFEST, is_models, published, within
from aerie.cache.sources.source import Listing, Offer, SourceError, TryAgainError

try:
    import boto3
    from botocore import UNSIGNED, exceptions
    from botocore.config import Config
    from botocore.parsers import ResponseParserError
except ModuleNotFoundError as error:
    raise SourceError(
        f"s3:// needs {error.name}, which is not installed: install python3-boto3, or requirements/models.lock"
    ) from None

_PIECE = 2**20
_PAGE = 1000  # objects, the most that S3 lists at once
_CONNECT_TIMEOUT = 20  # seconds
_READ_TIMEOUT = 60  # seconds in which nothing comes
_CONNECTIONS = 64
_HEADS_AT_ONCE = 8
_SHA256_BYTES = 32
_QUOTED = 300  # characters of what a store says
_ARCHIVED = {"GLACIER", "DEEP_ARCHIVE"}
_LATER = {
    "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "TooManyRequestsException",
    "RequestLimitExceeded", "RequestTimeout", "RequestTimeoutException", "InternalError", "InternalFailure",
    "ServiceUnavailable", "BandwidthLimitExceeded", "OperationAborted",
}  # fmt: skip
_GIVE_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
_CHANGED = "has changed since it was listed: let what writes it end, then run this again"
_UNKNOWN = f"is refused since the store does not know the credentials: {_GIVE_CREDENTIALS} of this store"
_RAN_OUT = "is refused since the credentials have run out: renew them, then run this again"
_ELSEWHERE = "is in another region: set AWS_REGION to the bucket's"
_REASONS = {
    "NoSuchKey": "is gone since it was listed: run this again",
    "InvalidObjectState": "is archived: restore it, then run this again",
    "RequestTimeTooSkewed": "is refused since this machine's clock is wrong: set it, then run this again",
    "InvalidAccessKeyId": _UNKNOWN,
    "SignatureDoesNotMatch": _UNKNOWN,
    "ExpiredToken": _RAN_OUT,
    "ExpiredTokenException": _RAN_OUT,
    "TokenRefreshRequired": _RAN_OUT,
    "InvalidToken": _RAN_OUT,
    "PermanentRedirect": _ELSEWHERE,
    "AuthorizationHeaderMalformed": _ELSEWHERE,
    "IllegalLocationConstraintException": _ELSEWHERE,
}
_REASONS_BY_STATUS: dict[int, str] = {
    HTTPStatus.MOVED_PERMANENTLY: _ELSEWHERE,
    HTTPStatus.FORBIDDEN: "may not be read with these credentials: they need s3:ListBucket on the bucket, and "
    "s3:GetObject on what is in it",
    HTTPStatus.NOT_FOUND: _REASONS["NoSuchKey"],
    HTTPStatus.PRECONDITION_FAILED: _CHANGED,
    HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE: _CHANGED,
}


class S3Source:
    """The objects below a prefix, or those that a manifest of Aerie's among them lists.

    Credentials are those that boto3 finds: environment, profile, the instance's role. Where there are none at all, the
    bucket is taken for a public one.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        revision: str | None = None,
        endpoint: str | None = None,
        region: str | None = None,
    ) -> None:
        self.description = f"s3://{bucket}/{prefix}".rstrip("/")
        named = {"endpoint": endpoint, "region": region}
        self.options = {name: value for name, value in named.items() if value is not None}
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._revision = revision
        self._anonymous = False
        self._keys: dict[str, str] = {}
        self._client: Any = None

    def list(self) -> Listing:
        """Return the objects below the prefix; with a manifest, those that it lists, with its digests.

        Raises SourceError where there is no such bucket, or nothing in it, or where it may not be read; TryAgainError
        where the store is busy or away.
        """
        with self._words(self.description):
            self._connect()
            return self._list()

    def read(self, offer: Offer, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes [start, end) of an object that `list` has given.

        Raises SourceError where it is another one now, TryAgainError where the store is busy or the connection breaks.
        """
        where = f"{self.description}/{offer.path}"
        if start == end:
            return
        with self._words(where):
            answer = self._client.get_object(
                Bucket=self._bucket, Key=self._keys[offer.path], Range=f"bytes={start}-{end - 1}", IfMatch=offer.version
            )
        body = answer["Body"]
        try:
            if "ETag" not in answer:
                raise TryAgainError(f"{where}: the connection ended within the answer's head")
            if answer["ETag"] != offer.version:
                raise SourceError(f"{where} {_CHANGED}")
            if answer.get("ContentRange") != f"bytes {start}-{end - 1}/{offer.size}" and end - start != offer.size:
                raise SourceError(
                    f"{where}: bytes {start} to {end} of {offer.size} were asked for, and the store answered with "
                    f"{answer.get('ContentRange') or 'the whole object'!r}: it cannot be fetched from in parts"
                )
            left = end - start
            while left:
                with self._words(where):
                    piece = body.read(min(_PIECE, left))
                if not piece:
                    raise TryAgainError(f"{where}: the connection ended {left} bytes too early")
                left -= len(piece)
                yield piece
        finally:
            # What was not read is not waited for.
            body.close()

    def close(self) -> None:
        """Give up the connections."""
        if self._client is not None:
            self._client.close()

    def _connect(self) -> None:
        if self._client is not None:
            return
        session = boto3.Session()
        self._anonymous = session.get_credentials() is None
        settings = Config(
            # Who calls tries again, and goes on where this stopped.
            retries={"total_max_attempts": 1},
            connect_timeout=_CONNECT_TIMEOUT,
            read_timeout=_READ_TIMEOUT,
            max_pool_connections=_CONNECTIONS,
            tcp_keepalive=True,
            # Checksums of the whole do not fit ranges, and stores other than Amazon's refuse the newest ones.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path" if "endpoint" in self.options else "auto"},
            signature_version=UNSIGNED if self._anonymous else None,
        )
        # boto3 has variables of its own, and does not read the one that everything else does.
        bundle = None if os.environ.get("AWS_CA_BUNDLE") else os.environ.get("SSL_CERT_FILE")
        # boto3 reads AWS_DEFAULT_REGION alone, everything else of Amazon's AWS_REGION first.
        region = self.options.get("region") or os.environ.get("AWS_REGION") or session.region_name or "us-east-1"
        self._client = session.client(
            "s3", region_name=region, endpoint_url=self.options.get("endpoint"), config=settings, verify=bundle or None
        )

    def _list(self) -> Listing:
        objects = self._objects()
        if not objects:
            raise SourceError(f"{self.description} has nothing in it: is the prefix right?")
        inner = within(objects, self.description, self._revision)
        objects = {name.removeprefix(inner): each for name, each in objects.items() if name.startswith(inner)}
        self._keys = {name: each["Key"] for name, each in objects.items()}
        found = {name: (int(each["Size"]), str(each["ETag"])) for name, each in objects.items()}
        if MANIFEST in objects:
            listing = published(self._manifest(objects[MANIFEST]), self.description, found, self._revision)
        else:
            with ThreadPoolExecutor(_HEADS_AT_ONCE) as heads:
                digests = dict(zip(objects, heads.map(self._digest, objects.values()), strict=True))
            offers = (Offer(name, size, digests[name], version=version) for name, (size, version) in found.items())
            listing = Listing(tuple(sorted(offers, key=lambda offer: offer.path)), None)
        for offer in listing.files:
            if (kept := objects[offer.path].get("StorageClass")) in _ARCHIVED:
                raise SourceError(
                    f"{self.description}/{offer.path} is archived ({kept}): restore it, then run this again"
                )
        return listing

    def _objects(self) -> dict[str, dict[str, Any]]:
        """Return all objects below the prefix by their names; what stands for a folder is left out."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix, PaginationConfig={"PageSize": _PAGE}
        )
        listed = []
        for page in pages:
            if "Name" not in page and "KeyCount" not in page:
                raise SourceError(f"{self.description}: what answers is not S3: is the endpoint right?")
            listed += page.get("Contents", ())
        named = ((each["Key"].removeprefix(self._prefix), each) for each in listed)
        return {name: each for name, each in named if name and not name.endswith("/") and is_models(name)}

    def _digest(self, listed: dict[str, Any]) -> str | None:
        """Return the SHA-256 of an object where the store has it of the whole; of parts it says nothing here."""
        if "SHA256" not in listed.get("ChecksumAlgorithm", ()) or listed.get("ChecksumType") == "COMPOSITE":
            return None
        answer = self._client.head_object(Bucket=self._bucket, Key=listed["Key"], ChecksumMode="ENABLED")
        if answer["ETag"] != listed["ETag"]:
            raise SourceError(f"s3://{self._bucket}/{listed['Key']} {_CHANGED}")
        if answer.get("ChecksumType") == "COMPOSITE":
            return None
        with contextlib.suppress(ValueError):
            digest = base64.b64decode(answer.get("ChecksumSHA256", ""), validate=True)
            return digest.hex() if len(digest) == _SHA256_BYTES else None
        return None

    def _manifest(self, listed: dict[str, Any]) -> str:
        where = f"s3://{self._bucket}/{listed['Key']}"
        if listed["Size"] > LARGEST_MANIFEST:
            raise SourceError(f"{where} has {listed['Size']} bytes: it is not one that Aerie wrote")
        offer = Offer(MANIFEST, listed["Size"], version=listed["ETag"])
        try:
            return b"".join(self.read(offer, 0, offer.size)).decode()
        except UnicodeDecodeError:
            raise SourceError(f"{where} is not text: it is not one that Aerie wrote") from None

    @contextlib.contextmanager
    def _words(self, where: str) -> Iterator[None]:
        try:
            yield
        except exceptions.ClientError as error:
            raise self._refusal(where, error) from None
        except exceptions.SSLError as error:
            # A bundle that is not there is one, too; a handshake that was cut is none.
            if not any(each in str(error).upper() for each in ("CERTIFICATE", "NO SUCH FILE")):
                raise TryAgainError(f"{where}: {_shown(error)}") from None
            raise SourceError(
                f"{where}: {_shown(error)}; where the store or a proxy has a certificate of your own authority, name "
                "its file in SSL_CERT_FILE or AWS_CA_BUNDLE"
            ) from None
        except ResponseParserError as error:
            raise SourceError(f"{where}: what answers is not S3 ({_shown(error)}): is the endpoint right?") from None
        except (
            exceptions.HTTPClientError,
            exceptions.ConnectionError,
            exceptions.IncompleteReadError,
            OSError,
        ) as error:
            raise TryAgainError(f"{where}: {_shown(error)}") from None
        except (exceptions.BotoCoreError, ValueError) as error:
            # Credentials that are half there, a profile that is not, an endpoint that is no address.
            raise SourceError(f"{where}: {_shown(error)}") from None
        except RecursionError:
            # botocore follows a bucket from region to region, and asks in the wrong one where that is.
            raise SourceError(f"{where} {_ELSEWHERE}") from None

    def _refusal(self, where: str, error: Any) -> SourceError | TryAgainError:
        answer = error.response
        code = str(answer.get("Error", {}).get("Code", ""))
        status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        said = _shown(f"{code}: {answer.get('Error', {}).get('Message', '')}")
        if code == "NotImplemented" or status == HTTPStatus.METHOD_NOT_ALLOWED:
            return SourceError(f"{where}: what answers is not S3 ({said}): is the endpoint right?")
        if code in _LATER or status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS:
            return TryAgainError(f"{where}: the store is busy or broken ({said})", _retry_after(answer))
        return SourceError(f"{where} {self._reason(code, status)} ({said})")

    def _reason(self, code: str, status: int) -> str:
        if code == "NoSuchBucket":
            look = "and at --endpoint" if "endpoint" in self.options else "and give --endpoint for another store's"
            return f"cannot be had: there is no bucket {self._bucket!r}; look at its name, {look}"
        if code in _REASONS:
            return _REASONS[code]
        if status == HTTPStatus.FORBIDDEN and self._anonymous:
            return f"is not public, and no credentials were found: {_GIVE_CREDENTIALS}"
        return _REASONS_BY_STATUS.get(status, "is refused")


def _shown(what: object) -> str:
    text = " ".join("".join(each if each.isprintable() else " " for each in str(what)).split()).strip(" :")
    return text if len(text) <= _QUOTED else text[:_QUOTED] + "..."


def _retry_after(answer: dict[str, Any]) -> float | None:
    """Return the seconds of the header Retry-After; its other form, a date, is not looked at."""
    text = str(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("retry-after", ""))
    return float(text) if text.isascii() and text.isdigit() else None
