"""What all that is fetched over HTTP has in common: patience, who is who, and what errors say."""

import ssl
import time
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from aerie.cache.sources.source import Offer, TryAgainError
from aerie.cache.words import quoted

STALL = 60.0
"""Seconds: a connection that brings less than LEAST in them is cut."""
LEAST = 64 * 1024
"""Bytes."""
CONNECT = 30.0  # seconds


def origin(address: str) -> tuple[str, str | None, int | None]:
    """Return scheme, host and port of an address."""
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        port = 0
    return parts.scheme, parts.hostname, port or {"http": 80, "https": 443}.get(parts.scheme)


def without_user(address: str) -> str:
    """Return an address without the user and password that may be in it."""
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def proxy_for(address: str) -> str | None:
    """Return the proxy by which an address is asked, without its user; None where none is."""
    parts = urlsplit(address)
    if not parts.hostname or proxy_bypass(parts.hostname):
        return None
    proxies = getproxies()
    found = proxies.get(parts.scheme) or proxies.get("all")
    if not found:
        return None
    return without_user(found if "://" in found else f"http://{found}")


def unreached(shown: str, address: str, error: BaseException) -> str:
    """Return that nobody answers there, with the proxy that was asked where there is one."""
    if proxy := proxy_for(address):
        return (
            f"{shown} cannot be reached by the proxy {proxy}, which the environment names: {words(error)}. Mend "
            "HTTPS_PROXY, HTTP_PROXY or ALL_PROXY, or let NO_PROXY leave that host out"
        )
    return f"{shown} does not answer: {words(error)}"


def is_no_tls(error: BaseException) -> bool:
    """Return whether what answered to a TLS handshake does not speak TLS."""
    at: BaseException | None = error
    while at is not None:
        if any(each in str(at) for each in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")):
            return True
        at = at.__cause__ or at.__context__
    return False


def in_vain(address: str, error: BaseException) -> str | None:
    """Return why asking there again changes nothing, and what to do; None where it may."""
    if is_certificate(error):
        return certificate(urlsplit(address).hostname, error)
    if is_no_tls(error):
        if proxy := proxy_for(address):
            return f"the proxy {proxy}, which the environment names, or what it leads to, does not speak TLS"
        shown = urlsplit(without_user(address))._replace(path="", query="", fragment="").geturl()
        return f"{shown} does not speak TLS, which https:// is: is http:// meant, or another port?"
    return None


def is_certificate(error: BaseException) -> bool:
    """Return whether it is that a server's certificate was not taken."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in str(at):
            return True
        at = at.__cause__ or at.__context__
    return False


def certificate(host: str | None, error: BaseException) -> str:
    """Return what to do about a certificate that was not taken."""
    return (
        f"{host} cannot prove that it is {host}: {words(error)}; where a proxy of yours answers in its place, "
        "name its certificate's file in SSL_CERT_FILE"
    )


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return for how many seconds a server wants to be left alone; None where it does not say."""
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


def words(error: BaseException) -> str:
    """Return what an error says, or what it is."""
    return quoted((str(error).strip().splitlines() or [""])[0]) or type(error).__name__


def watched(response: httpx.Response) -> Iterator[bytes]:
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


def exactly(offer: Offer, pieces: Iterator[bytes], skip: int, wanted: int) -> Iterator[bytes]:
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
