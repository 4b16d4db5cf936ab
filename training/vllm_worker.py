"""What runs inside vLLM's workers: takes the policy's weights in place and says which ones it has.

vLLM mixes the class into its worker (`--worker-extension-cls training.vllm_worker.WeightReceiver`), so this
module imports nothing but torch and safetensors: a server has an environment of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

ELEMENTS = 1024
"""First elements of each tensor that the digest reads: an update moves all of a matrix."""
Report = dict[str, Any]
"""version: int | None, digest: str, intact: bool; see `WeightReceiver.plumbline_report`."""


class Digest:
    """Fingerprint of a set of named tensors, the same in whatever order they pass."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}

    def watch(self, items: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Hands the tensors on, and remembers the beginning of each."""
        for name, tensor in items:
            head = tensor.detach().flatten()[:ELEMENTS].cpu().contiguous().view(torch.uint8)
            text = f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode() + head.numpy().tobytes()
            self._seen[name] = hashlib.sha256(text).hexdigest()
            yield name, tensor

    def value(self) -> str:
        """12 hexadecimal digits (48 bits: exact in a float64, so that ranks can add it up)."""
        return hashlib.sha256("".join(map("\0".join, sorted(self._seen.items()))).encode()).hexdigest()[:12]


class WeightReceiver:
    """Methods that vLLM's worker gains; called through `collective_rpc`."""

    model_runner: Any
    _plumbline: tuple[int | None, str, list[float]] = (None, "", [])

    def plumbline_load(self, source: str | Iterable[tuple[str, Tensor]], version: int) -> Report:
        """Weights from a safetensors file that this machine sees, or, in the same process, as they are."""
        before = self._plumbline
        digest = Digest()
        items = digest.watch(_read(Path(source)) if isinstance(source, str) else source)
        self._plumbline = (None, "", [])
        # vllm-ascend's worker has no reload_weights, which also undoes what quantised layers made of theirs.
        reload = getattr(self, "reload_weights", None)
        if reload is None:
            self.model_runner.get_model().load_weights(items)
        else:
            reload(weights_iterator=items)
        found = digest.value()
        sums = self._sums()
        moved = sums != before[2] or found == before[1]
        self._plumbline = (version if moved else before[0], found if moved else before[1], sums)
        return self.plumbline_report()

    def plumbline_report(self) -> Report:
        """Version and digest of what was loaded last (None: nothing yet), and whether the weights are still
        those: somebody else's update, a sleep that dropped them and a restart show here."""
        version, digest, sums = self._plumbline
        return {"version": version, "digest": digest, "intact": bool(sums) and sums == self._sums()}

    @torch.no_grad()
    def _sums(self) -> list[float]:
        parameters = list(self.model_runner.get_model().parameters())
        return [float(parameter.sum(dtype=torch.float64)) for parameter in parameters]


def _read(file: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(file, framework="pt") as tensors:
        for name in sorted(tensors.keys()):
            yield name, tensors.get_tensor(name)
