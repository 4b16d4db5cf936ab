"""Log-probabilities of known answers without a gradient; those of the reference are computed once and kept.

The answers of preference data never change, so the frozen reference is asked about each of them once, before
the first update, and no second model stands in memory while the policy learns. What is kept lies in a file
named by content: the reference's weights, every id, and all that may change the last bit (layout, precision,
ranks, torch). Another beta, learning rate or loss finds it again; anything else computes anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.errors import DivergenceError, Stopped
from training.batches import Tree, collate, deal, plan
from training.config import Precision
from training.device import autocast, device, resolve
from training.engine import Engine
from training.models import is_lora

LAYOUT_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}
"""Mean difference in nats a token between trees in one row and padded rows: another order of sums."""
KEPT = 8
"""Files of reference log-probabilities that stay; the oldest go."""


@dataclass(frozen=True)
class Forward:
    """How answers are put through the model: one layout, so that the same question gives the same bits."""

    engine: Engine
    """Its module is an `AnswerLogprobs`."""
    pad_id: int
    shared: bool
    """Whether a prompt is computed once for its answers."""
    token_budget: int
    temperature: float
    precision: Precision

    def logps(
        self, trees: Sequence[Tree], stopped: Callable[[], bool] = lambda: False
    ) -> list[Float[Tensor, " K"]]:
        """Of each tree the log-probabilities of its answers' tokens, one answer after the other, float64.

        Every rank gets all of them. `stopped` is asked between micro batches.
        """
        starts = [0]
        for tree in trees:
            starts.append(starts[-1] + sum(map(len, tree.answers)))
        flat = torch.zeros(starts[-1], dtype=torch.float64)
        engine = self.engine
        engine.module.eval()
        for indices, counts in deal(plan(trees, self.token_budget, self.shared), engine.rank, engine.world):
            part = self.micro([trees[index] for index in indices], self.shared)
            if counts:
                places = [torch.arange(starts[index], starts[index + 1]) for index in indices]
                flat[torch.cat(places)] = part
            if engine.sum([float(stopped())])[0]:
                raise Stopped("stopped while the reference was asked; run again to start from there")
        engine.module.train()
        if engine.world > 1:
            flat = torch.tensor(engine.sum(flat.tolist()), dtype=torch.float64)
        return list(torch.split(flat, [end - start for start, end in itertools.pairwise(starts)]))

    def micro(self, trees: Sequence[Tree], shared: bool) -> Float[Tensor, " K"]:
        """Log-probabilities of one micro batch, answers in order; the caller has set evaluation mode."""
        batch = collate(trees, self.pad_id, shared).to(device())
        with torch.no_grad(), autocast(self.precision):
            logp, _ = self.engine.module(batch, self.temperature)
        found: Tensor = logp[batch.mask].double().cpu()
        return found


def choose_layout(forward: Forward, trees: Sequence[Tree], reason: str | None) -> tuple[bool, str]:
    """Whether trees lie in one row, each prompt once, and why not: the model can't (`reason`), or the numbers
    differ from those of padded rows."""
    if reason is not None:
        return False, reason
    rows = [trees[index] for index in plan(trees, forward.token_budget, True)[0][:2]]
    forward.engine.module.eval()
    gap = float((forward.micro(rows, True) - forward.micro(rows, False)).abs().mean())
    forward.engine.module.train()
    bound = LAYOUT_TOLERANCE[resolve(forward.precision)]
    if gap <= bound:
        return True, ""
    return False, f"trees in one row change the log-probabilities by {gap:.2g} nats a token (bound {bound})"


def stack(parts: Sequence[Float[Tensor, " K"]], mask: Bool[Tensor, "N R"]) -> Float[Tensor, "N R"]:
    """Kept log-probabilities of some trees in the shape of their batch, zeros where `mask` is False."""
    flat = torch.cat(list(parts)).to(mask.device, torch.float32)
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, flat)


def reference_logps(
    forward: Forward,
    model: Any,
    trees: Sequence[Tree],
    identity: str,
    folder: Path,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[list[Float[Tensor, " K"]], bool]:
    """`Forward.logps` by the reference, and whether they were found in `folder`.

    Call it before the first update and before a checkpoint is loaded: without adapters the untouched policy
    itself is the reference. `identity`: digest of its weights.
    """
    sizes = [sum(map(len, tree.answers)) for tree in trees]
    file = folder / f"{_key(forward, trees, identity)}.safetensors"
    kept = _read(file, sum(sizes))
    # A rank of another machine may not see the file; then all compute.
    if forward.engine.sum([float(kept is not None)])[0] == forward.engine.world and kept is not None:
        return list(torch.split(kept, sizes)), True
    off: AbstractContextManager[Any] = model.disable_adapter() if is_lora(model) else contextlib.nullcontext()
    with off:
        parts = forward.logps(trees, stopped)
    whole = torch.cat(parts)
    if not bool(whole.isfinite().all()):
        at = next(index for index, part in enumerate(parts) if not bool(part.isfinite().all()))
        raise DivergenceError(f"row {trees[at].key}: the reference gives a non-finite log-probability")
    if forward.engine.first:
        _write(file, whole)
    forward.engine.barrier()
    return parts, False


def _key(forward: Forward, trees: Sequence[Tree], identity: str) -> str:
    layout = [
        forward.shared, forward.token_budget, forward.temperature, resolve(forward.precision),
        forward.engine.world, forward.engine.params.tensor_parallel, device().type,
        torch.get_num_threads(), torch.__version__,
    ]  # fmt: skip
    whole = hashlib.sha256(json.dumps([identity, layout]).encode())
    for tree in trees:
        whole.update(json.dumps([tree.prompt, tree.answers]).encode())
    return whole.hexdigest()[:32]


def _read(file: Path, size: int) -> Float[Tensor, " K"] | None:
    try:
        logp = load_file(file)["logp"]
    except (OSError, KeyError, SafetensorError):
        return None
    return logp if logp.shape == (size,) and bool(logp.isfinite().all()) else None


def _write(file: Path, logp: Float[Tensor, " K"]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    save_file({"logp": logp.contiguous()}, unfinished)
    unfinished.replace(file)
    files = sorted(file.parent.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
    for old in files[:-KEPT]:
        old.unlink(missing_ok=True)
