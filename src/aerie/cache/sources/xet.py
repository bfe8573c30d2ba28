"""Files of the Hub from Xet, its own storage, through hf_xet.

Not proven by tests: Xet's own servers, which cannot be reached from where this was written. Proven are ranges through
hf_xet from its storage on a local disk, the request for its token, and what follows where it does not answer.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urljoin

import httpx

from aerie.cache.sources import web
from aerie.cache.sources.source import Offer, TryAgainError

_PIECE = 2**20
_FAILURES = 3
"""In a row; then it may be the network that does not let it through."""


class XetRefusedError(Exception):
    """Xet does not give a file, and will not."""


class Xet:
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
        if web.origin(urljoin(self._endpoint, found.refresh_route)) != web.origin(self._endpoint):
            raise XetRefusedError("its token would come from another host, to which the Hub's token does not go")
        self._files[path] = found
        return found

    def is_hopeless(self) -> bool:
        """Whether it failed so often in a row that it may be the network that does not let it through."""
        return self._failures >= _FAILURES

    def read(self, file_data: Any, offer: Offer, start: int, end: int) -> Iterator[bytes]:
        """Yield a file's bytes [start, end); raises TryAgainError and XetRefusedError."""
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
            raise XetRefusedError(f"hf_xet cannot be imported: {error}") from None
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
            raise XetRefusedError(web.words(error)) from None
        except Exception as error:  # noqa: BLE001 - its errors have no common class
            with self._lock:
                self._group = None
            raise TryAgainError(f"Xet: {web.words(error)}") from None
        if watch.fired:
            raise TryAgainError(f"Xet brought nothing for {web.STALL:g} s")
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
                        f"the Hub gives no token for Xet now ({status})", web.retry_after(error.response.headers)
                    ) from None
                raise XetRefusedError(f"the Hub gives no token for it ({status})") from None
            except ValueError as error:
                raise XetRefusedError(web.words(error)) from None
            except Exception as error:  # noqa: BLE001 - of huggingface_hub's HTTP library
                raise TryAgainError(f"the Hub gives no token for Xet now: {web.words(error)}") from None
            import hf_xet  # noqa: PLC0415

            if self._session is None:
                # Whether to try again is decided by who reads; and nobody is told how fast it went.
                self._session = hf_xet.XetSession(
                    hf_xet.XetConfig().with_config(
                        {
                            "telemetry.enabled": False,
                            "client.retry_max_attempts": 2,
                            "client.connect_timeout": f"{web.CONNECT:g}s",
                            "client.read_timeout": f"{web.STALL:g}s",
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
        while not self._done.wait(min(1.0, web.STALL / 4)):
            since = self._since
            if since is not None and time.monotonic() - since > web.STALL:
                self.fired = True
                with contextlib.suppress(Exception):
                    cancel()
                return
