"""Shared set-up: no network beyond loopback, no telemetry, shapes of the mathematics checked at run time."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    DO_NOT_TRACK="true",
    MLFLOW_DISABLE_TELEMETRY="true",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    DVC_NO_ANALYTICS="1",
    GX_ANALYTICS_ENABLED="false",
    TOKENIZERS_PARALLELISM="false",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from jaxtyping import install_import_hook

install_import_hook(
    ["training.losses", "training.advantages", "training.kl", "training.logprobs", "training.rewards"],
    "beartype.beartype",
)

import pytest  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"


@pytest.fixture(autouse=True)
def only_loopback(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuse every connection that leaves the machine: nothing in the tests needs one."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        host = address[0] if isinstance(address, tuple) else ""
        outside = host not in ("127.0.0.1", "::1", "localhost")
        if outside and self.family in (socket.AF_INET, socket.AF_INET6):
            raise PermissionError(f"a test tried to reach {address!r}: loopback only")
        connect(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", guarded)
    yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the public files that the project is tried on; tests that want it skip when it is absent."""
    if not SHARED.is_dir():
        pytest.skip("the folder of public data is not beside this checkout")
    return SHARED
