"""On the path of the end-to-end tests' processes: no connection beyond loopback, each try is written down.

Python imports this file by itself at every start, so it holds for all that a run starts.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

_HERE = ("127.0.0.1", "::1", "0.0.0.0", "::", "localhost", "", None)


def _refused(what: str, host: object) -> None:
    name = host.decode(errors="replace") if isinstance(host, bytes) else host
    if name in _HERE or name == socket.gethostname() or str(name).startswith("127."):
        return
    with Path(os.environ["CALLS_OUTSIDE"]).open("a", encoding="utf-8") as log:
        log.write(f"{what} {name!r}\n")
    raise PermissionError(f"{what} {name!r}: loopback only")


def _guard(name: str) -> None:
    real = getattr(socket.socket, name)

    def guarded(self: socket.socket, *arguments: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6) and isinstance(arguments[-1], tuple):
            _refused(name, arguments[-1][0])
        return real(self, *arguments)

    setattr(socket.socket, name, guarded)


if "CALLS_OUTSIDE" in os.environ:
    for _name in ("connect", "connect_ex", "sendto"):
        _guard(_name)
    _lookup = socket.getaddrinfo

    def _guarded_lookup(host: Any, *arguments: Any, **named: Any) -> Any:
        _refused("getaddrinfo", host)
        return _lookup(host, *arguments, **named)

    socket.getaddrinfo = _guarded_lookup
