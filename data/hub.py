"""Whether the Hugging Face hub answers, asked once and within seconds: its clients try for half a minute."""

from __future__ import annotations

import os
import socket
import urllib.request
from functools import cache
from urllib.parse import urlsplit

_SECONDS = 5.0


def reachable() -> bool:
    """Whether its host takes a connection; False under HF_HUB_OFFLINE=1, True behind a proxy, which has to
    say.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    where = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if where.scheme in urllib.request.getproxies():
        return True
    return _answers(where.hostname or "", where.port or {"https": 443}.get(where.scheme, 80))


@cache
def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=_SECONDS):
            return True
    except OSError:
        return False
