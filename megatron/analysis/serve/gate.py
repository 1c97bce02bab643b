"""Decide who may read the pages: by the Host header, and by a token unless the server is local.

The Host header must name the server. Otherwise a web page elsewhere could let its own host name
point to this machine and read the dump from the visitor's browser (DNS rebinding). A foreign page
may link to the explorer, but its other requests are refused: although it could not read the
answers, it could make the server measure tensors. A server that other machines can reach also
requires a token, once in the URL and then in a cookie.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import quote, urlencode

from megatron.analysis.serve.address import fields_of

Start = Callable[..., Any]
Application = Callable[[dict[str, Any], Start], Iterable[bytes]]

PARAMETER = "token"
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
#: Headers of all answers. Scripts and styles may come only from this server. Inline styles are
#: allowed for Plotly, and inline scripts because Dash starts with one.
HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
        "worker-src 'self' blob:; object-src 'none'; base-uri 'none'; frame-ancestors 'none'; "
        "form-action 'self'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)


def is_local(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_token() -> str:
    """Return a token that nobody can guess."""
    return secrets.token_urlsafe(24)


@dataclass(frozen=True)
class Gate:
    """A WSGI application that checks each request before the pages answer it."""

    application: Application
    host: str  #: address at which the server listens
    token: str | None = None  #: None if everybody on this machine may read

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        """Answer a request, or refuse it."""
        if not self._knows(str(environ.get("HTTP_HOST", ""))):
            return _refuse(start, "400 Bad Request", "The Host header does not name this server.")
        if _is_foreign(environ):
            return _refuse(start, "403 Forbidden", "Another page sent this request.")
        if self.token is None:
            return self.application(environ, _with_headers(start))
        query = str(environ.get("QUERY_STRING", ""))
        given = fields_of(query)
        if PARAMETER in given:
            if not self._fits(given.pop(PARAMETER), self.token):
                return _refuse(start, "403 Forbidden", "The token is wrong.")
            return self._remember(environ, start, given)
        if not self._has_cookie(environ):
            why = "Open the address with ?token=... that the server has printed."
            return _refuse(start, "403 Forbidden", why)
        return self.application(environ, _with_headers(start))

    def _knows(self, header: str) -> bool:
        """Return whether a Host header names this server.

        A local server has local names only. A server that listens everywhere may have any name, and
        is protected by its token.
        """
        name = header.rpartition(":")[0] if header.rpartition(":")[2].isdigit() else header
        name = name.lower()
        if is_local(self.host):
            return name in _LOCAL_NAMES or name == self.host
        return bool(name)

    def _fits(self, given: str, wanted: str) -> bool:
        return hmac.compare_digest(given.encode(), wanted.encode())

    def _cookie(self, environ: dict[str, Any]) -> tuple[str, str]:
        """Return the cookie's name, which depends on the server's port, and the cookie's value."""
        value = hashlib.sha256(f"explorer {self.token}".encode()).hexdigest()
        return f"explorer_{environ.get('SERVER_PORT', '')}", value

    def _has_cookie(self, environ: dict[str, Any]) -> bool:
        name, wanted = self._cookie(environ)
        try:
            found = SimpleCookie(str(environ.get("HTTP_COOKIE", ""))).get(name)
        except CookieError:
            return False
        return found is not None and self._fits(found.value, wanted)

    def _remember(
        self, environ: dict[str, Any], start: Start, others: dict[str, str]
    ) -> Iterable[bytes]:
        """Set the cookie, and redirect the browser to the same address without the token.

        The cookie is also sent if the user follows a link in another page (SameSite=Lax).
        Otherwise the redirect after such a link would be refused. Other requests of foreign pages
        are refused by `_is_foreign`.
        """
        name, value = self._cookie(environ)
        path = "/" + quote(str(environ.get("PATH_INFO", "/")).lstrip("/\\"), encoding="latin-1")
        where = f"{path}?{urlencode(others)}" if others else path
        headers = [
            ("Location", where),
            ("Set-Cookie", f"{name}={value}; Path=/; HttpOnly; SameSite=Lax; Max-Age=2592000"),
            ("Content-Length", "0"),
            *HEADERS,
        ]
        start("303 See Other", headers)
        return [b""]


def _is_foreign(environ: dict[str, Any]) -> bool:
    """Return whether a page of another origin sent a request; a followed link does not count."""
    origin = environ.get("HTTP_ORIGIN")
    if origin is not None:
        own = str(environ.get("HTTP_HOST", "")).lower()
        if str(origin).lower().partition("://")[2] != own:
            return True
    if environ.get("HTTP_SEC_FETCH_SITE", "none") in ("same-origin", "none"):
        return False
    is_link = environ.get("HTTP_SEC_FETCH_MODE") == "navigate"
    is_page = environ.get("HTTP_SEC_FETCH_DEST") == "document"
    return not (is_link and is_page and environ.get("REQUEST_METHOD") == "GET")


def _with_headers(start: Start) -> Start:
    def started(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
        return start(status, [*headers, *HEADERS], *rest)

    return started


def _refuse(start: Start, status: str, why: str) -> Iterable[bytes]:
    content = f"{why}\n".encode()
    headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(content)))]
    start(status, [*headers, *HEADERS])
    return [content]
