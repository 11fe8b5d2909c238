"""Who may ask: the checks before anything else looks at a request.

A server on this computer can be reached by every web page that its user opens:
pages of other sites send requests to 127.0.0.1 (refused by Origin and
Sec-Fetch-Site), and a name of theirs can be made to point here (refused by
Host). Keys are compared in constant time.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from engine.server.wire import ApiError, encoded, error_body
from engine.settings import ServerSettings

__all__ = ["Guard", "is_loopback"]

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger("inglenook.access")

_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104  # what "every address of this computer" is written as
_OPEN_PATHS = {"/health"}
_METHODS = "GET, POST, OPTIONS"
_SEND_S = 60.0  # a client that takes nothing for so long is given up


class Guard:
    """Refuses what must not reach `app`, and logs a line per request: never a body, a query or a key."""

    def __init__(self, app: App, settings: ServerSettings) -> None:
        self._app = app
        self._keys = [key.encode() for key in settings.api_key]
        self._origins = {origin.rstrip("/").lower() for origin in settings.allow_origin}
        self._names = {"localhost", *(name.rstrip(".").lower() for name in settings.allow_host)}
        bound = settings.host.strip("[]").lower()
        self._everywhere = bound in _EVERYWHERE
        if not self._everywhere:
            self._names.add(bound)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()
        status = 0
        headers = _headers(scope)
        origin = self._allowed_origin(headers)

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
                if origin is not None:
                    extra += [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
                message["headers"] = [*message.get("headers", ()), *extra]
            async with asyncio.timeout(_SEND_S):
                await send(message)

        try:
            refused = self._refusal(scope, headers, origin)
            if refused is not None:
                await _answer(sent, refused.status, refused.headers, encoded(error_body(refused)))
            elif scope["method"] == "OPTIONS":
                await _answer(sent, 204, _preflight(origin), b"")
            else:
                await self._app(scope, receive, sent)
        except TimeoutError:
            log.info("%s was given up: the client took nothing for %.0f s", scope["path"], _SEND_S)
        finally:
            path = scope["path"][:200].encode("ascii", "backslashreplace").decode()
            client = (scope.get("client") or ("?",))[0]
            log.info("%s %s %d %.3f s from %s", scope["method"], path, status, time.monotonic() - began_s, client)

    def _refusal(self, scope: Scope, headers: dict[bytes, list[bytes]], origin: bytes | None) -> ApiError | None:
        hosts = headers.get(b"host", [])
        if len(hosts) != 1 or not self._host_allowed(hosts[0]):
            return ApiError(403, "this Host is not served; --allow-host adds a name", code="host_not_allowed")
        if b"origin" in headers and origin is None and not self._same_origin(headers[b"origin"], hosts[0]):
            return ApiError(403, "web pages may not ask here; --allow-origin lets one in", code="origin_not_allowed")
        site = headers.get(b"sec-fetch-site", [b"none"])[0].lower()
        if origin is None and site not in (b"none", b"same-origin"):
            return ApiError(403, "web pages may not ask here; --allow-origin lets one in", code="origin_not_allowed")
        preflight = scope["method"] == "OPTIONS" and origin is not None
        if self._keys and scope["path"] not in _OPEN_PATHS and not preflight and not self._knows_key(headers):
            return ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        return None

    def _host_allowed(self, header: bytes) -> bool:
        name = _host_name(header)
        if name is None:
            return False
        if name in self._names or is_loopback(name):
            return True
        # Behind a name of a stranger's can be any address, but an address is only itself.
        return self._everywhere and _address(name) is not None and name not in _EVERYWHERE

    def _allowed_origin(self, headers: dict[bytes, list[bytes]]) -> bytes | None:
        """The Origin of a page that was let in by name."""
        origins = headers.get(b"origin", [])
        if len(origins) == 1 and origins[0].decode("latin-1").rstrip("/").lower() in self._origins:
            return origins[0]
        return None

    @staticmethod
    def _same_origin(origins: list[bytes], host: bytes) -> bool:
        """A page of ours: its origin is where the request goes."""
        if len(origins) != 1:
            return False
        scheme, _, place = origins[0].lower().partition(b"://")
        return scheme in (b"http", b"https") and place == host.lower()

    def _knows_key(self, headers: dict[bytes, list[bytes]]) -> bool:
        given = headers.get(b"authorization", [])
        if len(given) != 1 or not given[0].startswith(b"Bearer "):
            return False
        shown = given[0][len(b"Bearer ") :]
        # All are compared, whichever fits, so that the time tells nothing.
        return sum(hmac.compare_digest(shown, key) for key in self._keys) > 0


def _headers(scope: Scope) -> dict[bytes, list[bytes]]:
    headers: dict[bytes, list[bytes]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.lower(), []).append(value)
    return headers


def _host_name(header: bytes) -> str | None:
    """The name or address in a Host header, without port, brackets and trailing dot; None if it is malformed."""
    text = header.decode("latin-1").lower()
    if text.startswith("["):
        name, bracket, port = text[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            return None
        port = port[1:]
    else:
        name, _, port = text.partition(":")
        name = name.removesuffix(".")
    return name if name and (not port or (port.isascii() and port.isdigit())) else None


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(name: str) -> bool:
    """A name or address by which only this computer is reached."""
    address = _address(name.strip("[]").lower())
    return address.is_loopback if address is not None else name.lower() == "localhost"


def _preflight(origin: bytes | None) -> dict[str, str]:
    if origin is None:
        return {"allow": _METHODS}
    return {
        "access-control-allow-methods": _METHODS,
        "access-control-allow-headers": "authorization, content-type",
        "access-control-max-age": "600",
    }


async def _answer(send: Send, status: int, headers: dict[str, str], body: bytes) -> None:
    fields = [(name.encode(), value.encode()) for name, value in headers.items()]
    if body:
        fields += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})
