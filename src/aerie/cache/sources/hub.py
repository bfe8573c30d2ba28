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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import httpx

from aerie.cache.names import is_revision
from aerie.cache.sources import web
from aerie.cache.sources.hub_token import find_token
from aerie.cache.sources.source import Listing, Offer, SourceError, TryAgainError
from aerie.cache.sources.streams import Stream
from aerie.cache.sources.xet import Xet, XetRefusedError
from aerie.cache.words import quoted

HUB = "https://huggingface.co"
_HOPS = 5
_SMALLEST_WINDOW = 64 * 1024
_LARGEST_WINDOW = 4 * 2**20

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
        self._shown = web.without_user(self._endpoint)
        self.options = {} if self._endpoint == HUB else {"endpoint": self._shown}
        if urlsplit(self._endpoint).scheme not in {"http", "https"} or not urlsplit(self._endpoint).hostname:
            raise SourceError(f"HF_ENDPOINT is {self._shown!r}, which is no address such as https://mirror.example")
        self._repository = repository
        self._wanted = revision or "main"
        self._commit: str | None = None
        self._token = find_token(token_file)
        self._transport = transport
        # A signed address, which needs no token, by path.
        self._addresses: dict[str, str] = {}
        self._not_in_xet: set[str] = set()
        self._told_of_ranges = False
        # Of files whose server knows no ranges, by path.
        self._streams: dict[str, Stream] = {}
        # Who reads slowly lets the kernel read ahead, into the buffers of every connection.
        self._window = None if limit is None else int(min(max(limit / 40, _SMALLEST_WINDOW), _LARGEST_WINDOW))
        self._xet = Xet(self._endpoint, self._token) if transport != "https" else None
        disabled = os.environ.get("HF_HUB_DISABLE_XET", "").upper() in {"1", "ON", "YES", "TRUE"}
        if transport == "auto" and (disabled or limit is not None):  # Xet reads ahead, faster than a limit says
            self._xet = None
        with contextlib.suppress(ImportError, AttributeError):  # it is not of httpx's interface
            from httpcore._sync.http11 import HTTP11Connection  # noqa: PLC0415

            HTTP11Connection.READ_NUM_BYTES = _READ
        try:
            self._client = httpx.Client(
                timeout=httpx.Timeout(web.STALL, connect=web.CONNECT, pool=None),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
                headers={"Accept-Encoding": "identity", "User-Agent": "aerie"},
            )
        except OSError as error:
            bundle = os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR")
            raise SourceError(f"SSL_CERT_FILE is {bundle!r}, which cannot be read: {web.words(error)}") from None
        except (ImportError, ValueError, httpx.InvalidURL):  # its own words may hold a proxy's password
            raise SourceError(
                "a proxy of the environment (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY) cannot be used: expected an address "
                "such as http://proxy.example:3128, and not SOCKS"
            ) from None

    def list(self) -> Listing:
        """Return what the revision holds, its branch or tag resolved to the commit. See Source."""
        from huggingface_hub import HfApi, errors  # noqa: PLC0415 - half a second, and not for a directory

        api = HfApi(endpoint=self._endpoint, token=self._token or False)
        try:
            info = api.model_info(self._repository, revision=self._wanted, files_metadata=True, timeout=web.STALL)
        except errors.HFValidationError as error:
            raise SourceError(f"{self._repository!r} is no repository's name: {error}") from None
        except errors.OfflineModeIsEnabled:
            raise SourceError(f"{self.description} needs a network, and HF_HUB_OFFLINE forbids one") from None
        except errors.HfHubHTTPError as error:
            response = error.response
            raise self._refused(response.status_code, response.headers) from None
        except Exception as error:
            if why := web.in_vain(self._endpoint, error):
                raise SourceError(why) from None
            # huggingface_hub's own HTTP library changes its name between releases; its errors come from there.
            if isinstance(error, OSError) or type(error).__module__.startswith("httpx"):
                raise TryAgainError(web.unreached(self._shown, self._endpoint, error)) from None
            if isinstance(error, ValueError | KeyError | TypeError | AttributeError):
                raise TryAgainError(f"{self._shown} answers what is no model's description: {error!r}") from None
            raise
        commit = info.sha or ""
        if not is_revision(commit):
            raise SourceError(f"{self._shown} names the commit {commit!r}, expected 40 hexadecimal digits")
        if is_revision(self._wanted) and commit != self._wanted:
            raise SourceError(f"{self._shown} gives commit {commit} where {self._wanted} was asked for")
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
                file_data = xet.known(offer.path) or self._ask_for_xet(xet, offer)
                if file_data is not None:
                    for piece in xet.read(file_data, offer, start, end):
                        got += len(piece)
                        yield piece
                    return
            except TryAgainError as error:
                if self._transport == "xet" or not xet.is_hopeless():
                    raise
                self._leave_xet(str(error))
            except XetRefusedError as error:
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
                f"{self._shown} does not tell how large {sibling.rfilename!r} is: it is no whole mirror of the Hub"
            )
        digest = sibling.blob_id if sibling.lfs is None else str(sibling.lfs.sha256).removeprefix("sha256:")
        if not digest or len(digest) != (40 if sibling.lfs is None else 64) or set(digest) - set("0123456789abcdef"):
            raise SourceError(
                f"{self._shown} gives {digest!r} as the digest of {sibling.rfilename!r}, by which nothing can be "
                "proven: it is no whole mirror of the Hub"
            )
        if sibling.lfs is None:
            return Offer(sibling.rfilename, sibling.size, git_sha1=sibling.blob_id, version=sibling.blob_id)
        return Offer(sibling.rfilename, sibling.size, sha256=digest, version=digest)

    def _leave_xet(self, why: str) -> None:
        if self._xet is not None:
            self._xet = None
            _log.warning("Xet is of no use here (%s): going on over HTTPS", why)

    def _ask_for_xet(self, xet: Xet, offer: Offer) -> Any:
        """Return where Xet has the file; None where the file is not in Xet."""
        if offer.sha256 is None or offer.path in self._not_in_xet:  # what is in git is not in Xet
            return None
        address = self._address(offer.path)
        with self._open(address, {"Range": "bytes=0-0"}, offer) as response:
            if response.is_error:  # 429 says nothing about Xet
                raise self._refused(response.status_code, response.headers)
            found = xet.learn(offer.path, response)
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
                    yield from web.exactly(offer, web.watched(response), 0, end - start)
                    return
            self._streams.setdefault(offer.path, Stream())
            if not self._told_of_ranges:
                self._told_of_ranges = True
                host = response.url.host
                _log.warning("%s sends whole files where parts are asked for: over one connection each, then", host)
        yield from self._in_order(self._streams[offer.path], offer, start, end)

    def _in_order(self, stream: Stream, offer: Offer, start: int, end: int) -> Iterator[bytes]:
        """Yield a part of what can only be had from the beginning, when it is this part's turn."""
        with stream.turn(start):
            try:
                if stream.pieces is None or stream.at != start:
                    stream.close()
                    response = stream.stack.enter_context(self._answer(offer, {}))
                    self._check(offer, response, 0, offer.size)
                    stream.pieces, stream.at = (
                        web.exactly(offer, web.watched(response), start, offer.size - start),
                        start,
                    )
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
            raise TryAgainError(
                f"the proxy for {urlsplit(address).hostname} does not do it: {web.words(error)}"
            ) from None
        except httpx.ReadTimeout:
            raise TryAgainError(f"{urlsplit(address).hostname} brought nothing for {web.STALL:g} s") from None
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            host = urlsplit(address).hostname
            if why := web.in_vain(address, error):
                raise SourceError(why) from None
            if not self._is_ours(address):
                self._addresses.pop(offer.path, None)  # the Hub may send elsewhere by now
            raise TryAgainError(f"{host}: {web.words(error)}") from None

    def _address(self, path: str) -> str:
        return f"{self._endpoint}/{self._repository}/resolve/{self._commit}/{quote(path, safe='/')}"

    def _is_ours(self, address: str) -> bool:
        """Whether the token may go there."""
        return web.origin(address) == web.origin(self._endpoint)

    def _refused(self, status: int, headers: Mapping[str, str]) -> Exception:  # noqa: PLR0911 - one for each answer
        """Return the error for an answer that is no success."""
        code, message = headers.get("X-Error-Code", ""), quoted(headers.get("X-Error-Message", ""))
        where = f"{self._shown}/{self._repository}"
        unauthorized, forbidden = status == httpx.codes.UNAUTHORIZED, status == httpx.codes.FORBIDDEN
        if status in {408, 425, 429} or status >= httpx.codes.INTERNAL_SERVER_ERROR:
            what = "too many requests" if status == httpx.codes.TOO_MANY_REQUESTS else "it has a problem"
            return TryAgainError(f"{self._shown} answers {status} ({what})", web.retry_after(headers))
        if code == "RevisionNotFound":
            return SourceError(f"{where} has no revision {self._wanted!r}: see {where}/commits/main")
        if code == "EntryNotFound":
            return SourceError(f"{where} has lost a file of revision {self._commit}: run fetch again")
        if unauthorized and "Invalid credentials" in message:
            return SourceError(
                "the Hub does not know this token: it was revoked, has expired or is mistyped; "
                f"make one that may read at {self._shown}/settings/tokens"
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


def _range_error(offer: Offer, found: str, start: int, end: int) -> Exception:
    asked = f"bytes {start}-{end - 1}/{offer.size}"
    total = found.rpartition("/")[2]
    if total.isdecimal() and int(total) != offer.size:
        return SourceError(
            f"{offer.path} has {total} bytes at the source, and {offer.size} were announced: "
            "it has changed, or a proxy alters it; run fetch again"
        )
    return TryAgainError(f"{offer.path}: the source sends {found!r}, expected {asked!r}")
