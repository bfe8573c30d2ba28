"""Repositories of the Hugging Face Hub and its mirrors.

What there is, and what is refused, is asked through huggingface_hub. The bytes are fetched here, in ranges, since its
own downloads keep nothing of a file that was cut (huggingface_hub#4196): over HTTPS, or from Xet through hf_xet.

Not proven by tests: Xet's own servers and the Hub itself, which cannot be reached from where this was written. Proven
are ranges through hf_xet from its storage on a local disk, the request for its token, and falling back to HTTPS.
"""

import contextlib
import logging
import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import httpx

from aerie.cache.sources.source import Listing, Offer, SourceError, TryAgainError

HUB = "https://huggingface.co"
STALL = 60.0
"""Seconds: a connection that brings less than LEAST in them is cut."""
LEAST = 64 * 1024
"""Bytes."""
_PIECE = 2**20
_CONNECT = 30.0  # seconds
_HOPS = 5
_PATIENCE = 0.5  # seconds
_SMALLEST_WINDOW = 64 * 1024
_LARGEST_WINDOW = 4 * 2**20
_XET_FAILURES = 3
"""In a row; then `auto` stays with HTTPS."""
_LONGEST_TOKEN = 4096

_READ = 256 * 1024
"""Bytes that httpx takes from a socket at once; its own 64 KiB cost a third more of a core."""

_log = logging.getLogger("aerie")


class HubSource:
    """One repository, at one revision. See Source."""

    def __init__(
        self,
        repository: str,
        *,
        revision: str | None = None,
        endpoint: str | None = None,
        token_file: Path | None = None,
        transport: str = "auto",
        limit: float | None = None,
    ) -> None:
        """Prepare; nothing is asked yet. Raises SourceError where the token or the endpoint is none."""
        self.description = f"hf:{repository}"
        self._endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
        self.options = {} if self._endpoint == HUB else {"endpoint": _without_user(self._endpoint)}
        if urlsplit(self._endpoint).scheme not in {"http", "https"} or not urlsplit(self._endpoint).hostname:
            raise SourceError(f"HF_ENDPOINT is {self._endpoint!r}, which is no address such as https://mirror.example")
        self._repository = repository
        self._wanted = revision or "main"
        self._commit: str | None = None
        self._token = _token(token_file)
        self._transport = transport
        # A signed address, which needs no token, by path.
        self._addresses: dict[str, str] = {}
        self._not_in_xet: set[str] = set()
        self._told_of_ranges = False
        # Of files whose server knows no ranges, by path.
        self._streams: dict[str, _Stream] = {}
        # Who reads slowly lets the kernel read ahead, into the buffers of every connection.
        self._window = None if limit is None else int(min(max(limit / 40, _SMALLEST_WINDOW), _LARGEST_WINDOW))
        self._xet = _Xet(self._endpoint, self._token) if transport != "https" else None
        disabled = os.environ.get("HF_HUB_DISABLE_XET", "").upper() in {"1", "ON", "YES", "TRUE"}
        if transport == "auto" and (disabled or limit is not None):  # Xet reads ahead, faster than a limit says
            self._xet = None
        with contextlib.suppress(ImportError, AttributeError):  # it is not of httpx's interface
            from httpcore._sync.http11 import HTTP11Connection  # noqa: PLC0415

            HTTP11Connection.READ_NUM_BYTES = _READ
        self._client = httpx.Client(
            timeout=httpx.Timeout(STALL, connect=_CONNECT, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            headers={"Accept-Encoding": "identity", "User-Agent": "aerie"},
        )

    def list(self) -> Listing:
        """Return what the revision holds, its branch or tag resolved to the commit. See Source."""
        from huggingface_hub import HfApi, errors  # noqa: PLC0415 - half a second, and not for a directory

        api = HfApi(endpoint=self._endpoint, token=self._token or False)
        try:
            info = api.model_info(self._repository, revision=self._wanted, files_metadata=True, timeout=STALL)
        except errors.HFValidationError as error:
            raise SourceError(f"{self._repository!r} is no repository's name: {error}") from None
        except errors.OfflineModeIsEnabled:
            raise SourceError(f"{self.description} needs a network, and HF_HUB_OFFLINE forbids one") from None
        except errors.HfHubHTTPError as error:
            response = error.response
            raise self._refused(response.status_code, response.headers) from None
        except Exception as error:
            if _is_certificate(error):
                raise SourceError(_certificate(urlsplit(self._endpoint).hostname, error)) from None
            # huggingface_hub's own HTTP library changes its name between releases; its errors come from there.
            if isinstance(error, OSError) or type(error).__module__.startswith("httpx"):
                raise TryAgainError(f"{self._endpoint} does not answer: {_words(error)}") from None
            if isinstance(error, ValueError | KeyError | TypeError | AttributeError):
                raise TryAgainError(f"{self._endpoint} answers what is no model's description: {error!r}") from None
            raise
        commit = info.sha or ""
        if len(commit) != 40 or set(commit) - set("0123456789abcdef"):  # noqa: PLR2004 - SHA-1
            raise SourceError(f"{self._endpoint} names the commit {commit!r}, expected 40 hexadecimal digits")
        if _is_commit(self._wanted) and commit != self._wanted:
            raise SourceError(f"{self._endpoint} gives commit {commit} where {self._wanted} was asked for")
        self._commit = commit
        return Listing(tuple(self._offer(each) for each in info.siblings or ()), commit)

    def read(self, offer: Offer, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes [start, end) of the file. See Source."""
        if self._commit is None:
            raise SourceError(f"{self.description} was not listed")
        if start >= end:
            return
        if self._xet is not None:
            got = start
            xet = self._xet
            try:
                file_data = xet.known(offer.path) or self._ask_for_xet(offer)
                if file_data is not None:
                    for piece in xet.read(file_data, offer, start, end):
                        got += len(piece)
                        yield piece
                    return
            except TryAgainError as error:
                if self._transport == "xet" or not xet.is_hopeless():
                    raise
                self._leave_xet(str(error))
            except _XetRefusedError as error:
                if self._transport == "xet":
                    raise SourceError(f"Xet does not give {offer.path}: {error}; try --transport https") from None
                self._leave_xet(str(error))
            start = got
        yield from self._over_https(offer, start, end)

    def close(self) -> None:
        """Give up connections."""
        self._client.close()
        if self._xet is not None:
            self._xet.close()

    def _offer(self, sibling: Any) -> Offer:
        if type(sibling.size) is not int or sibling.size < 0:
            raise SourceError(
                f"{self._endpoint} does not tell how large {sibling.rfilename!r} is: it is no whole mirror of the Hub"
            )
        digest = sibling.blob_id if sibling.lfs is None else str(sibling.lfs.sha256).removeprefix("sha256:")
        if not digest or len(digest) != (40 if sibling.lfs is None else 64) or set(digest) - set("0123456789abcdef"):
            raise SourceError(
                f"{self._endpoint} gives {digest!r} as the digest of {sibling.rfilename!r}, by which nothing can be "
                "proven: it is no whole mirror of the Hub"
            )
        if sibling.lfs is None:
            return Offer(sibling.rfilename, sibling.size, git_sha1=sibling.blob_id, version=sibling.blob_id)
        return Offer(sibling.rfilename, sibling.size, sha256=digest, version=digest)

    def _leave_xet(self, why: str) -> None:
        if self._xet is not None:
            self._xet = None
            _log.warning("Xet is of no use here (%s): going on over HTTPS", why)

    def _ask_for_xet(self, offer: Offer) -> Any:
        """Return where Xet has the file; None where the file is not in Xet."""
        assert self._xet is not None  # noqa: S101 - for the type checker
        if offer.sha256 is None or offer.path in self._not_in_xet:  # what is in git is not in Xet
            return None
        address = self._address(offer.path)
        with self._open(address, {"Range": "bytes=0-0"}, offer) as response:
            found = self._xet.learn(offer.path, response)
            if found is None:
                self._not_in_xet.add(offer.path)
                if response.is_redirect and not self._is_ours(location := self._location(address, response, offer)):
                    self._addresses[offer.path] = location
            return found

    def _location(self, address: str, response: httpx.Response, offer: Offer) -> str:
        given = response.headers.get("Location", "")
        try:
            location: str = urljoin(address, given)
            good = urlsplit(location).scheme in {"http", "https"} and bool(urlsplit(location).hostname)
        except ValueError:
            good = False
        if not good or given.rstrip("/").endswith(":"):
            where = given.partition("?")[0]
            raise SourceError(f"{offer.path} is redirected to {where!r}, which is no web address")
        return location

    def _over_https(self, offer: Offer, start: int, end: int) -> Iterator[bytes]:
        if offer.path not in self._streams:
            with self._answer(offer, {"Range": f"bytes={start}-{end - 1}"}) as response:
                self._check(offer, response, start, end)
                if response.status_code == httpx.codes.PARTIAL_CONTENT or (start, end) == (0, offer.size):
                    yield from _exactly(offer, _watched(response), 0, end - start)
                    return
            self._streams.setdefault(offer.path, _Stream())
            if not self._told_of_ranges:
                self._told_of_ranges = True
                host = response.url.host
                _log.warning("%s sends whole files where parts are asked for: over one connection each, then", host)
        yield from self._in_order(self._streams[offer.path], offer, start, end)

    def _in_order(self, stream: "_Stream", offer: Offer, start: int, end: int) -> Iterator[bytes]:
        """Yield a part of what can only be had from the beginning, when it is this part's turn."""
        with stream.turn(start):
            try:
                if stream.pieces is None or stream.at != start:
                    stream.close()
                    response = stream.stack.enter_context(self._answer(offer, {}))
                    self._check(offer, response, 0, offer.size)
                    stream.pieces, stream.at = _exactly(offer, _watched(response), start, offer.size - start), start
                while stream.at < end:
                    piece = stream.rest or next(stream.pieces)
                    piece, stream.rest = piece[: end - stream.at], piece[end - stream.at :]
                    stream.at += len(piece)
                    yield piece
            except BaseException:
                stream.close()
                raise
            if stream.at == offer.size:
                stream.close()

    @contextlib.contextmanager
    def _answer(self, offer: Offer, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        """Ask for a file where the Hub sends for it; the answer may be an error's."""
        address = self._addresses.get(offer.path) or self._address(offer.path)
        for attempt in range(_HOPS):
            with self._open(address, headers, offer) as response:
                if response.is_redirect:
                    address = self._location(address, response, offer)
                    if not self._is_ours(address):
                        self._addresses[offer.path] = address
                    continue
                if not self._is_ours(address) and response.status_code in {400, 401, 403, 404, 410}:
                    # It was signed for a while; the Hub signs another one.
                    self._addresses.pop(offer.path, None)
                    address = self._address(offer.path)
                    if attempt + 2 < _HOPS:
                        continue
                    host = urlsplit(str(response.url)).hostname
                    raise SourceError(f"{host}, where the Hub sends for {offer.path}, answers {response.status_code}")
                yield response
                return
        raise SourceError(f"{offer.path} is redirected without end")

    def _check(self, offer: Offer, response: httpx.Response, start: int, end: int) -> None:
        """Raise SourceError or TryAgainError where an answer is neither this part of the file nor all of it."""
        status = response.status_code
        if status == httpx.codes.PARTIAL_CONTENT:
            found = response.headers.get("Content-Range", "")
            if found.lower() not in {f"bytes {start}-{end - 1}/{total}" for total in (offer.size, "*")}:
                raise _range_error(offer, found, start, end)
        elif status == httpx.codes.OK:
            length = response.headers.get("Content-Length")
            if length is not None and length != str(offer.size):
                raise SourceError(
                    f"{offer.path} has {length} bytes at the source, and {offer.size} were announced: "
                    "it has changed, or a proxy alters it; run fetch again"
                )
        elif status == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise SourceError(f"{offer.path} is shorter at the source than the {offer.size} bytes announced")
        else:
            raise self._refused(status, response.headers)
        if self._window is not None:
            connection = response.extensions["network_stream"].get_extra_info("socket")
            if connection is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._window)

    @contextlib.contextmanager
    def _open(self, address: str, headers: Mapping[str, str], offer: Offer) -> Iterator[httpx.Response]:
        headers = dict(headers)
        if self._token and self._is_ours(address):
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            with self._client.stream("GET", address, headers=headers, follow_redirects=False) as response:
                yield response
        except httpx.InvalidURL as error:
            raise SourceError(f"{offer.path} is redirected to what is no address: {error}") from None
        except (httpx.ProxyError, httpx.UnsupportedProtocol) as error:
            raise TryAgainError(f"the proxy for {urlsplit(address).hostname} does not do it: {_words(error)}") from None
        except httpx.ReadTimeout:
            raise TryAgainError(f"{urlsplit(address).hostname} brought nothing for {STALL:g} s") from None
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            host = urlsplit(address).hostname
            if _is_certificate(error):
                raise SourceError(_certificate(host, error)) from None
            raise TryAgainError(f"{host}: {_words(error)}") from None

    def _address(self, path: str) -> str:
        return f"{self._endpoint}/{self._repository}/resolve/{self._commit}/{quote(path, safe='/')}"

    def _is_ours(self, address: str) -> bool:
        """Whether the token may go there."""
        return _origin(address) == _origin(self._endpoint)

    def _refused(self, status: int, headers: Mapping[str, str]) -> Exception:  # noqa: PLR0911 - one for each answer
        """Return the error for an answer that is no success."""
        code, message = headers.get("X-Error-Code", ""), headers.get("X-Error-Message", "")
        where = f"{self._endpoint}/{self._repository}"
        unauthorized, forbidden = status == httpx.codes.UNAUTHORIZED, status == httpx.codes.FORBIDDEN
        if status in {408, 425, 429} or status >= httpx.codes.INTERNAL_SERVER_ERROR:
            what = "too many requests" if status == httpx.codes.TOO_MANY_REQUESTS else "it has a problem"
            return TryAgainError(f"{self._endpoint} answers {status} ({what})", _retry_after(headers))
        if code == "RevisionNotFound":
            return SourceError(f"{where} has no revision {self._wanted!r}: see {where}/commits/main")
        if code == "EntryNotFound":
            return SourceError(f"{where} has lost a file of revision {self._commit}: run fetch again")
        if unauthorized and "Invalid credentials" in message:
            return SourceError(
                "the Hub does not know this token: it was revoked, has expired or is mistyped; "
                f"make one that may read at {self._endpoint}/settings/tokens"
            )
        if code == "GatedRepo" or (forbidden and self._token):
            if self._token:
                return SourceError(
                    f"{where} is gated, and this token's account has no access: accept the licence at {where}, wait "
                    "until it is granted where its owners decide, and let a fine-grained token read gated repositories"
                )
            return SourceError(
                f"{where} is gated: accept the licence at {where}, then give a token of that account "
                "(--token-file FILE, or HF_TOKEN)"
            )
        if code == "RepoNotFound" or unauthorized or status == httpx.codes.NOT_FOUND:
            hint = (
                "this token's account does not see it"
                if self._token
                else "it needs a token (--token-file FILE, or HF_TOKEN)"
            )
            return SourceError(f"{where} is not there, or private: check the name, or {hint}")
        if message == "Access to this resource is disabled.":
            return SourceError(f"{where} was disabled by the Hub")
        return SourceError(f"{where} answers {status}" + (f": {message}" if message else ""))


class _Stream:
    """A file that its server sends from the beginning only: those who want parts of it take turns, in order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[int] = []
        self._busy = False
        self.stack = contextlib.ExitStack()
        self.pieces: Iterator[bytes] | None = None
        self.at = 0
        self.rest = b""

    @contextlib.contextmanager
    def turn(self, start: int) -> Iterator[None]:
        """Wait until this part is the first of those that are wanted, and nobody reads."""
        with self._changed:
            # The parts before it may be about to come.
            self._changed.wait_for(lambda: self.at >= start, _PATIENCE)
            self._waiting.append(start)
            self._changed.wait_for(lambda: not self._busy and start == min(self._waiting))
            self._waiting.remove(start)
            self._busy = True
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def close(self) -> None:
        """Give the connection up."""
        self.stack.close()
        self.pieces, self.rest = None, b""


class _XetRefusedError(Exception):
    """Xet does not give a file, and will not."""


class _Xet:
    """Ranges of files through hf_xet; its sessions and tokens are made when first wanted."""

    def __init__(self, endpoint: str, token: str | None) -> None:
        self._endpoint = endpoint
        self._token = token
        self._lock = threading.Lock()
        self._session: Any = None
        self._group: Any = None
        self._files: dict[str, Any] = {}
        self._failures = 0

    def known(self, path: str) -> Any:
        """Return what `learn` found for this file."""
        return self._files.get(path)

    def learn(self, path: str, response: httpx.Response) -> Any:
        """Return where Xet has a file, by the Hub's answer; None where it has not."""
        from huggingface_hub.utils._xet import (  # noqa: PLC0415
            is_valid_xet_hash,
            parse_xet_file_data_from_response,
        )

        found = parse_xet_file_data_from_response(response, endpoint=self._endpoint)  # type: ignore[arg-type]  # of httpx
        if found is None or not is_valid_xet_hash(found.file_hash):
            return None
        if _origin(urljoin(self._endpoint, found.refresh_route)) != _origin(self._endpoint):
            raise _XetRefusedError("its token would come from another host, to which the Hub's token does not go")
        self._files[path] = found
        return found

    def is_hopeless(self) -> bool:
        """Whether it failed so often in a row that it may be the network that does not let it through."""
        return self._failures >= _XET_FAILURES

    def read(self, file_data: Any, offer: Offer, start: int, end: int) -> Iterator[bytes]:
        """Yield a file's bytes [start, end); raises TryAgainError and _XetRefusedError."""
        try:
            yield from self._read(file_data, offer, start, end)
        except TryAgainError:
            self._failures += 1
            raise
        self._failures = 0

    def _read(self, file_data: Any, offer: Offer, start: int, end: int) -> Iterator[bytes]:
        try:
            import hf_xet  # type: ignore[import-untyped]  # noqa: PLC0415
        except ImportError as error:
            raise _XetRefusedError(f"hf_xet cannot be imported: {error}") from None
        group = self._open(file_data)
        left = end - start
        watch = _Watch()
        try:
            stream = group.download_stream(hf_xet.XetFileInfo(file_data.file_hash, offer.size), start=start, end=end)
            with watch.over(stream.cancel):
                for whole in stream:
                    watch.saw(len(whole))
                    view = memoryview(whole)[:left]
                    left -= len(view)
                    for at in range(0, len(view), _PIECE):
                        yield bytes(view[at : at + _PIECE])
                    watch.begin()
        except (hf_xet.XetAuthenticationError, hf_xet.XetObjectNotFoundError, ValueError, TypeError) as error:
            with self._lock:
                self._group = None
            raise _XetRefusedError(_words(error)) from None
        except Exception as error:  # noqa: BLE001 - its errors have no common class
            with self._lock:
                self._group = None
            raise TryAgainError(f"Xet: {_words(error)}") from None
        if watch.fired:
            raise TryAgainError(f"Xet brought nothing for {STALL:g} s")
        if left:
            raise TryAgainError(f"Xet brought {end - start - left} of {end - start} bytes of {offer.path}")

    def _open(self, file_data: Any) -> Any:
        from huggingface_hub import errors  # noqa: PLC0415
        from huggingface_hub.utils._headers import build_hf_headers  # noqa: PLC0415
        from huggingface_hub.utils._xet import refresh_xet_connection_info, xet_headers_without_auth  # noqa: PLC0415

        with self._lock:
            if self._group is not None:
                return self._group
            headers = build_hf_headers(token=self._token or False)
            try:
                info = refresh_xet_connection_info(file_data=file_data, headers=headers)
            except errors.HfHubHTTPError as error:
                status = error.response.status_code
                if status in {408, 429} or status >= httpx.codes.INTERNAL_SERVER_ERROR:
                    raise TryAgainError(
                        f"the Hub gives no token for Xet now ({status})", _retry_after(error.response.headers)
                    ) from None
                raise _XetRefusedError(f"the Hub gives no token for it ({status})") from None
            except ValueError as error:
                raise _XetRefusedError(_words(error)) from None
            except Exception as error:  # noqa: BLE001 - of huggingface_hub's HTTP library
                raise TryAgainError(f"the Hub gives no token for Xet now: {_words(error)}") from None
            import hf_xet  # noqa: PLC0415

            if self._session is None:
                # Whether to try again is decided by who reads; and nobody is told how fast it went.
                self._session = hf_xet.XetSession(
                    hf_xet.XetConfig().with_config(
                        {
                            "telemetry.enabled": False,
                            "client.retry_max_attempts": 2,
                            "client.connect_timeout": f"{_CONNECT:g}s",
                            "client.read_timeout": f"{STALL:g}s",
                        }
                    )
                )
            self._group = self._session.new_download_stream_group(
                endpoint=info.endpoint,
                token=info.access_token,
                token_expiry_unix_secs=info.expiration_unix_epoch,
                token_refresh_url=file_data.refresh_route,
                token_refresh_headers=headers,
                custom_headers=xet_headers_without_auth(headers),
            )
            return self._group

    def close(self) -> None:
        """Give up connections."""
        group, session = self._group, self._session  # without the lock: who has it may wait for the network
        with contextlib.suppress(Exception):
            if group is not None:
                group.abort()
            if session is not None:
                session.sigint_abort()


class _Watch:
    """Calls `cancel` once nothing was seen for STALL seconds since `begin`."""

    def __init__(self) -> None:
        self._since: float | None = time.monotonic()
        self._done = threading.Event()
        self.fired = False

    def begin(self) -> None:
        """Wait for the next bytes."""
        self._since = time.monotonic()

    def saw(self, _count: int) -> None:
        """Do not wait: bytes came, and are being dealt with."""
        self._since = None

    @contextlib.contextmanager
    def over(self, cancel: Callable[[], object]) -> Iterator[None]:
        """Watch, as long as the block runs."""
        threading.Thread(target=self._watch, args=(cancel,), daemon=True).start()
        try:
            yield
        finally:
            self._done.set()

    def _watch(self, cancel: Callable[[], object]) -> None:
        while not self._done.wait(min(1.0, STALL / 4)):
            since = self._since
            if since is not None and time.monotonic() - since > STALL:
                self.fired = True
                with contextlib.suppress(Exception):
                    cancel()
                return


def _watched(response: httpx.Response) -> Iterator[bytes]:
    """Yield what comes; raises TryAgainError where it is a trickle."""
    waited, got = 0.0, 0
    pieces = response.iter_raw()
    while True:
        since = time.monotonic()
        piece = next(pieces, None)
        if piece is None:
            return
        waited += time.monotonic() - since
        got += len(piece)
        yield piece
        if got >= LEAST:
            waited, got = 0.0, 0
        elif waited > STALL:
            raise TryAgainError(f"{response.url.host} brought {got} bytes in {waited:.0f} s")


def _exactly(offer: Offer, pieces: Iterator[bytes], skip: int, wanted: int) -> Iterator[bytes]:
    """Yield `wanted` bytes after the first `skip`; raises TryAgainError where there are fewer."""
    left = wanted
    for whole in pieces:
        piece = whole
        if skip:
            piece = whole[skip:]
            skip -= len(whole) - len(piece)
        if len(piece) > left:
            piece = piece[:left]
        if piece:
            left -= len(piece)
            yield piece
        if not left:
            return
    raise TryAgainError(f"the connection ended after {wanted - left} of {wanted} bytes of {offer.path}")


def _range_error(offer: Offer, found: str, start: int, end: int) -> Exception:
    asked = f"bytes {start}-{end - 1}/{offer.size}"
    total = found.rpartition("/")[2]
    if total.isdecimal() and int(total) != offer.size:
        return SourceError(
            f"{offer.path} has {total} bytes at the source, and {offer.size} were announced: "
            "it has changed, or a proxy alters it; run fetch again"
        )
    return TryAgainError(f"{offer.path}: the source sends {found!r}, expected {asked!r}")


def _token(file: Path | None) -> str | None:
    if file is not None:
        try:
            with file.open("rb") as stream:
                mode = os.fstat(stream.fileno()).st_mode
                token = stream.read(_LONGEST_TOKEN + 1).decode("ascii").strip()
        except OSError as error:
            raise SourceError(f"the token's file {file} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            token = ""
        if not token or len(token) > _LONGEST_TOKEN or any(not "!" <= each <= "~" for each in token):
            raise SourceError(f"the token's file {file} holds no token: expected one line such as hf_...")
        if stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH):
            _log.warning("others can read the token's file %s: chmod 600 %s", file, file)
        return token
    if token := os.environ.get("HF_TOKEN", "").strip():
        return token
    from huggingface_hub import get_token  # noqa: PLC0415

    return get_token()


def _origin(address: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        port = 0
    return parts.scheme, parts.hostname, port or {"http": 80, "https": 443}.get(parts.scheme)


def _without_user(address: str) -> str:
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _is_commit(text: str) -> bool:
    return len(text) == 40 and not set(text) - set("0123456789abcdef")  # noqa: PLR2004 - SHA-1


def _is_certificate(error: BaseException) -> bool:
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in str(at):
            return True
        at = at.__cause__ or at.__context__
    return False


def _certificate(host: str | None, error: BaseException) -> str:
    return (
        f"{host} cannot prove that it is {host}: {_words(error)}; where a proxy of yours answers in its place, "
        "name its certificate's file in SSL_CERT_FILE"
    )


def _retry_after(headers: Mapping[str, str]) -> float | None:
    text = headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return float(text)
    try:
        due = parsedate_to_datetime(text)
        # By the server's own clock; ours may be wrong.
        now = parsedate_to_datetime(headers.get("Date", ""))
        return max(0.0, (due - now).total_seconds())
    except (ValueError, TypeError):
        return None


def _words(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
