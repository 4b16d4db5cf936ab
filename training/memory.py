"""What keeps the memory of a training process on a CPU small: freed memory goes back to the system before the
optimizer's step on rollouts (sampling and training leave gaps that the other's tensors do not fit into), and
frozen weights lie in a file.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from data.errors import InfrastructureError

ALIGNMENT = 64
"""Bytes: where a tensor may begin, as torch's own allocator has it."""


def give_back() -> None:
    """Returns freed memory to the system where tensors lie in it (glibc keeps the gaps between living ones;
    with an accelerator, and elsewhere: nothing)."""
    here = os.name == "posix" and not torch.accelerator.is_available()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if here else None
    if trim is not None:
        trim(0)


class Shelf:
    """The weights of a frozen model on the CPU, moved into a file without a name.

    Read, they are in memory; the system may have a layer's back after its forward pass, and all after
    `release`, and reads them again from its file cache, or the disk, when they are next used.
    """

    def __init__(self, model: nn.Module, folder: Path) -> None:
        """Moves the parameters of `model`, tied ones once; the file is below `folder`, and ends with this
        process. Raises InfrastructureError where it does not fit."""
        parameters = list(model.parameters())
        starts, size = [], 0
        for parameter in parameters:
            starts.append(size)
            size += -(-parameter.numel() * parameter.element_size() // ALIGNMENT) * ALIGNMENT
        with tempfile.TemporaryFile(dir=folder) as file:
            try:
                os.truncate(file.fileno(), max(size, 1))
                if hasattr(os, "posix_fallocate"):
                    # A file with holes would end the process, not raise, once the disk is full.
                    os.posix_fallocate(file.fileno(), 0, max(size, 1))
            except OSError as error:
                raise InfrastructureError(
                    f"{folder}: no room for the frozen reference's {size / 1e6:.0f} MB ({error.strerror}); "
                    "free some space"
                ) from error
            self._map = mmap.mmap(file.fileno(), max(size, 1))
        for parameter, start in zip(parameters, starts, strict=True):
            if parameter.numel():
                parameter.data = self._place(parameter.data, start)
        places = dict(zip(parameters, itertools.pairwise([*starts, size]), strict=True))
        for layer in _layers(model):
            ends = [end for parameter in layer.parameters() for end in places[parameter]]
            if ends:
                layer.register_forward_hook(self._after(min(ends), max(ends)))
        self.release()

    def _place(self, tensor: Tensor, start: int) -> Tensor:
        view = torch.frombuffer(self._map, dtype=tensor.dtype, count=tensor.numel(), offset=start)
        return view.view(tensor.shape).copy_(tensor)

    def _after(self, start: int, end: int) -> Callable[..., None]:
        """What lets go of the whole pages between two places."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        return lambda *given: self._let_go(first, last)

    def release(self) -> None:
        """Lets go of the memory, not of the weights."""
        self._let_go(0, len(self._map))

    def _let_go(self, first: int, last: int) -> None:
        if first < last and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


def _layers(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model, each of which is used once in a forward pass."""
    stacks = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    return [layer for stack in stacks for layer in stack]
