"""Start and stop the web server.

Waitress answers the requests on a few threads. Flask's own server warns that it is for development
only, and Dash's debug mode would let a visitor run code; neither is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from megatron.analysis.serve.explorer import Explorer
from megatron.analysis.serve.gate import PARAMETER, Gate, is_local, new_token
from megatron.analysis.stats.cache import open_cache
from megatron.analysis.text_table import shown

THREADS = 8  #: number of requests that are answered at the same time
MOST_BODY = 1 << 20  #: maximum size of a request, in bytes
MOST_CONNECTIONS = 500  #: maximum number of open connections, most of which may be idle
_ARENA_MAX = -8  #: parameter M_ARENA_MAX of the function mallopt of glibc
ARENAS = 2  #: maximum number of memory arenas
IDLE = 30  #: time after which a connection without a request is closed, in seconds


@dataclass(frozen=True)
class Options:
    """Options of the server."""

    folder: Path
    formats: Sequence[str]
    cache: Path | None
    host: str = "127.0.0.1"
    port: int = 8050
    token: str | None = None
    logs: Sequence[Path] = ()
    study: Path | None = None


def serve(options: Options) -> int:
    """Serve the pages until Ctrl-C, and return the exit status.

    Raises:
        ValueError, OSError: if the port is taken, the address does not belong to this machine, or
            the cache cannot be used.
    """
    from megatron.analysis.serve.application import create

    with open_cache(options.cache, options.folder):
        pass

    token = options.token
    if token is None and not is_local(options.host):
        token = new_token()
    explorer = Explorer(
        options.folder,
        options.formats,
        cache=options.cache,
        logs=options.logs,
        study=options.study,
    )
    _use_few_arenas()
    try:
        explorer.measurer.fork()  # before the web server starts its threads
        server = _listen(options, token, create(explorer).server)
        try:
            # A name such as localhost may stand for several addresses; the server then has no
            # `effective_port`.
            port = int(getattr(server, "effective_port", 0) or server.effective_listen[0][1])
            explorer.start()
            _announce(options, port, token)
            server.run()
        finally:
            server.close()
    except KeyboardInterrupt:
        pass
    finally:
        explorer.close()
    return 0


def _use_few_arenas() -> None:
    """Let threads reuse the memory that other threads have freed.

    By default, the C library creates separate memory arenas for threads, up to 8 per core, and each
    arena keeps its freed memory.
    """
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no mallopt
        ctypes.CDLL(None).mallopt(_ARENA_MAX, ARENAS)


def _listen(options: Options, token: str | None, application: Any) -> Any:
    """Return a server that listens, but does not answer yet."""
    import waitress

    for name in ("waitress", "waitress.queue"):
        logging.getLogger(name).setLevel(logging.ERROR)
    gate = Gate(application, options.host, token)
    try:
        return waitress.create_server(
            gate,
            host=options.host,
            port=options.port,
            threads=THREADS,
            max_request_body_size=MOST_BODY,
            connection_limit=MOST_CONNECTIONS,
            asyncore_use_poll=True,
            channel_timeout=IDLE,
            cleanup_interval=10,
            ident="explorer",
            clear_untrusted_proxy_headers=True,
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"port {options.port} of {options.host} is taken; choose another port with --port, "
                "or any free port with --port 0"
            ) from None
        if error.errno == errno.EACCES:
            raise ValueError(
                f"port {options.port} may not be opened; choose a port above 1023 with --port"
            ) from None
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise ValueError(
                f"--host {options.host} is not an address of this machine; 127.0.0.1 serves this "
                "machine only, and 0.0.0.0 everybody who has the token"
            ) from None
        raise
    except ValueError as error:  # waitress could not resolve the name of the host
        raise ValueError(
            f"--host {options.host} is not an address of this machine ({error}); 127.0.0.1 serves "
            "this machine only, and 0.0.0.0 everybody who has the token"
        ) from None


def _announce(options: Options, port: int, token: str | None) -> None:
    everywhere = options.host in ("0.0.0.0", "::")
    host = socket.gethostname() if everywhere else options.host
    host = f"[{host}]" if ":" in host else host
    query = f"?{urlencode({PARAMETER: token})}" if token is not None else ""
    print(f"Serving {shown(options.folder)} at http://{host}:{port}/{query}", flush=True)
    if options.cache is None:
        print("[NOTE] without a cache, the next start measures all tensors again", file=sys.stderr)
    print("Ctrl-C stops the server.", flush=True)
