"""Frozen weights in a file, and memory given back."""

from __future__ import annotations

import errno
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from data.errors import InfrastructureError
from tests.training.tiny import llama
from training.launch import ALLOCATOR
from training.memory import ALIGNMENT, Shelf, give_back


def resident_kb() -> int:
    """Resident memory of this process."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmRSS:")[1].split()[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_shelved_model_is_the_same_function(tmp_path: Path, dtype: torch.dtype) -> None:
    model = llama().to(dtype).eval()
    ids = torch.arange(2, 14)[None]
    expected, state = model(ids).logits, {name: t.clone() for name, t in model.state_dict().items()}
    shelf = Shelf(model, tmp_path)
    for _ in range(2):
        assert torch.equal(model(ids).logits, expected)
        shelf.release()
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert all(p.data_ptr() % ALIGNMENT == 0 for p in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight, "tied weights lie there once"
    assert not list(tmp_path.iterdir()), "the file has no name: nothing to clean up, whatever happens"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_released_weights_take_no_memory(tmp_path: Path) -> None:
    model = nn.Linear(4096, 4096, bias=False).requires_grad_(False)
    expected = model.weight.sum()
    shelf = Shelf(model, tmp_path)
    assert torch.equal(model.weight.sum(), expected)
    read = resident_kb()
    shelf.release()
    assert read - resident_kb() > 60_000, "64 MB were resident"
    assert torch.equal(model.weight.sum(), expected)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_layer_that_was_used_takes_no_memory(tmp_path: Path) -> None:
    """Eight layers of 16 MB, one after the other."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2048, 2048) for _ in range(8)])
    model.requires_grad_(False)
    ids = torch.ones(1, 2048)
    expected = [layer(ids) for layer in model.layers]
    shelf = Shelf(model, tmp_path)
    before = resident_kb()
    for layer, wanted in zip(model.layers, expected, strict=True):
        assert torch.equal(layer(ids), wanted)
        assert resident_kb() - before < 12_000
    assert torch.equal(model.layers[0](ids), expected[0]), "it is read again"
    shelf.release()


def test_a_full_disk_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InfrastructureError, match=r"no room for the frozen reference.*No space left"):
        Shelf(llama(), tmp_path)


def test_a_model_without_weights_or_with_empty_ones(tmp_path: Path) -> None:
    Shelf(nn.Identity(), tmp_path).release()
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(0, 3))
    Shelf(model, tmp_path)
    assert model.weight.shape == (0, 3)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_freed_memory_between_living_tensors_goes_back() -> None:
    # Pieces below glibc's limit for maps of their own lie side by side on its heap.
    pieces = [torch.ones(2**14) for _ in range(2000)]
    kept = pieces[::2]
    before = resident_kb()
    pieces.clear()
    give_back()
    assert before - resident_kb() > 40_000 and len(kept) == 1000, "half of 131 MB is free"


CHURN = """
import resource, torch
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step = lambda: [torch.ones(2**24) for _ in range(4)]
step()
before = faults()
for _ in range(8):
    step()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_what_a_step_frees_serves_the_next_one() -> None:
    """The launcher's settings: memory that is freed is not fetched from the system again."""
    plain = {name: value for name, value in os.environ.items() if name not in ALLOCATOR}
    seen = [
        int(subprocess.run([sys.executable, "-c", CHURN], env=env, check=True, capture_output=True).stdout)
        for env in (plain, {**plain, **ALLOCATOR})
    ]
    assert seen[1] < seen[0] / 50, seen
