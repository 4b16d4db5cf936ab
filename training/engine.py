"""Gradients to steps: one engine, two backends.

`torch` is plain AdamW with an all-reduce, and allows float64; `deepspeed` adds ZeRO. Both count alike: a
loss comes divided by the GLOBAL number of tokens or pairs, gradients are summed over ranks, so how a batch
is split does not show. A gradient that is not finite moves nothing: neither weights nor optimizer state
nor, with them, the run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from data.errors import ConfigurationError, DivergenceError
from training.config import EngineParams
from training.device import device
from training.zero import gather_layer, import_deepspeed, wrap

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
NORM_PIECE = 1 << 17
"""Numbers that the norm of a gradient takes in at a time: a megabyte in float64."""
FUSED = ("cpu", "cuda", "xpu")
"""Devices where AdamW reads and writes each number once; elsewhere tensor by tensor."""


@dataclass(frozen=True)
class StepInfo:
    """What one optimizer step did."""

    grad_norm: float
    lr: float
    finite: bool
    """False: the gradient was not finite, nothing moved and the gradient is gone."""


def connect() -> tuple[int, int]:
    """Joins the process group that the launcher describes, or makes one of a single rank; returns rank and
    world."""
    if not dist.is_initialized():
        where = device()
        if where.type != "cpu":
            torch.accelerator.set_device_index(where.index)
        backend = dist.get_default_backend_for_device(where)
        if "MASTER_ADDR" in os.environ and "RANK" in os.environ:
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        else:
            dist.init_process_group(
                backend, store=HashStore(), rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT
            )
    return dist.get_rank(), dist.get_world_size()


class Engine:
    """Owns optimizer, schedule and gradients of one module. Every rank calls the same methods in the same
    order."""

    def __init__(
        self,
        module: nn.Module,
        params: EngineParams,
        *,
        lr: float,
        total_steps: int,
        warmup: float,
        min_lr_share: float,
        weight_decay: float,
        clip_norm: float,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        fast: Iterable[nn.Parameter] = (),
        fast_factor: float = 1.0,
    ) -> None:
        """`fast` parameters (a new head) learn `fast_factor` times as fast as the others."""
        process, processes = connect()
        self.first = process == 0
        """Whether this process writes what all share."""
        self.process = process
        self.rank, self.world = process // params.tensor_parallel, processes // params.tensor_parallel
        """Which share of the data this is, and of how many; ranks that hold one model together have one."""
        self.params = params
        self.steps = 0
        self.nonfinite = 0
        """Steps in a row whose gradient was not finite."""
        self.nonfinite_total = 0
        """All steps whose gradient was not finite."""
        self._schedule = (lr, total_steps, max(1, round(warmup * total_steps)) if warmup else 0, min_lr_share)
        self._scale = 1.0
        self._clip = clip_norm
        groups = _groups(module, weight_decay, {id(parameter) for parameter in fast}, fast_factor)
        self._optimizer = torch.optim.AdamW(
            groups, lr=lr, betas=betas or (params.beta1, params.beta2), eps=eps or params.eps,
            fused=device().type in FUSED,
        )  # fmt: skip
        if not params.zero:
            self._make_moments()
        self._deepspeed: Any = None
        self._module = module
        if params.backend == "deepspeed":
            self._deepspeed = wrap(module, self._optimizer, params, clip_norm)

    @property
    def module(self) -> nn.Module:
        """What to call; the module itself, or DeepSpeed's engine around it."""
        wrapped: nn.Module = self._module if self._deepspeed is None else self._deepspeed
        return wrapped

    def lr(self) -> float:
        """Learning rate of the next step: linear warmup, then a cosine down to a share of the peak, times
        the scale."""
        peak, total, warmup, share = self._schedule
        if self.steps < warmup:
            return peak * self._scale * (self.steps + 1) / warmup
        done = min(1.0, (self.steps - warmup) / max(1, total - warmup))
        return peak * self._scale * (share + (1 - share) * 0.5 * (1 + math.cos(math.pi * done)))

    def scale_lr(self, factor: float) -> None:
        """Multiplies all later learning rates; a guard's answer to trouble. Kept in checkpoints."""
        self._scale *= factor

    @property
    def lr_scale(self) -> float:
        """Product of all `scale_lr` factors."""
        return self._scale

    def backward(self, loss: Tensor, last: bool) -> None:
        """Adds the gradient of a micro batch; `last` says that `step` comes next. Loss: divided by the
        global count."""
        if self._deepspeed is None:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        self._deepspeed.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over ranks; the loss is already a share of the global one, so that is undone.
        self._deepspeed.backward(loss * self.world)

    def skip(self) -> StepInfo:
        """A step without any gradient on any rank: the schedule goes on, nothing moves."""
        lr = self.lr()
        self.steps += 1
        return StepInfo(0.0, lr, True)

    def step(self, decay: bool = True) -> StepInfo:
        """One optimizer step, or none when the gradient is not finite; k such steps in a row are a
        divergence. `decay` False: weights without a gradient stay as they are."""
        lr = self.lr()
        optimizer = self._optimizer if self._deepspeed is None else self._deepspeed.optimizer
        for group in optimizer.param_groups:
            group["lr"] = lr * group["factor"]
            group["weight_decay"] = group["decay"] if decay else 0.0
        norm = self._torch_step() if self._deepspeed is None else self._deepspeed_step()
        finite = math.isfinite(norm)
        self.steps += 1
        self.nonfinite = 0 if finite else self.nonfinite + 1
        self.nonfinite_total += not finite
        limit, share, planned = self.params.nonfinite_limit, self.params.nonfinite_share, self._schedule[1]
        if self.nonfinite >= limit or self.nonfinite_total > max(limit - 1, share * planned):
            raise DivergenceError(
                f"the gradient was not finite in {self.nonfinite} steps in a row (engine.nonfinite_limit: "
                f"{limit}), in {self.nonfinite_total} of {planned} in all (engine.nonfinite_share: {share}); "
                "lower lr, or look for broken rows or rewards; the last checkpoint is unharmed"
            )
        return StepInfo(norm, lr, finite)

    def _make_moments(self) -> None:
        """Makes the optimizer's state as its first step would: made there, it would come on top of what the
        backward pass has freed between its gradients."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                state = self._optimizer.state[parameter]
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))

    def _torch_step(self) -> float:
        gradients = [p.grad for p in self._trainable() if p.grad is not None]
        if self.world > 1:
            for parameter in self._trainable():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
            gradients = [p.grad for p in self._trainable() if p.grad is not None]
        norm = _norm(gradients)
        if math.isfinite(norm):
            _clip(gradients, norm, self._clip)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def _deepspeed_step(self) -> float:
        engine = self._deepspeed
        if not engine.zero_optimization():
            # Stage 0 would step into a NaN; the stages above check for themselves and skip.
            norm = _norm([p.grad for p in self._trainable() if p.grad is not None])
            if math.isfinite(norm):
                engine.step()
            else:
                engine.zero_grad()
            return norm
        engine.step()
        if engine.optimizer.overflow:
            return math.inf
        return float(engine.get_global_grad_norm())

    def _trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._module.parameters() if parameter.requires_grad]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums counts over the shares of the data, in float64 where the device has it."""
        parts = self.params.tensor_parallel
        if self.world * parts == 1:
            return [float(value) for value in values]
        where = device()
        dtype = torch.float32 if where.type == "mps" else torch.float64
        total = torch.tensor(list(values), dtype=dtype, device=where)
        # Over all ranks, so that those of one model agree on what only one of them has seen (a stop signal).
        dist.all_reduce(total)
        return [float(value) / parts for value in total.tolist()]

    def barrier(self) -> None:
        """Waits for all ranks."""
        if dist.get_world_size() > 1:
            dist.barrier()

    def full_state(self, part: nn.Module) -> dict[str, Tensor] | None:
        """All tensors of a part of the module on the CPU at the first process where weights are in parts
        (ZeRO-3, tensor parallel; every rank must call it), else None: the module holds them itself."""
        if self.params.zero == 3:
            whole = import_deepspeed().zero.GatheredParameters
        elif self.params.tensor_parallel > 1:
            whole = gather_layer
        else:
            return None
        state: dict[str, Tensor] = {}
        names = {id(parameter): name for name, parameter in part.named_parameters()}
        # One layer after the other: the whole model need not fit on the device.
        for module in part.modules():
            own = [(names.pop(id(p)), p) for p in module.parameters(recurse=False) if id(p) in names]
            with whole([parameter for _, parameter in own]) if own else nullcontext():
                for name, parameter in own if self.first else ():
                    state[name] = parameter.detach().to("cpu", copy=True)
        return state

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Within it the weights are whole on every rank (ZeRO-3), so that ranks may work at their own pace;
        every rank must enter and leave it."""
        if self.params.zero != 3:
            yield
            return
        # Its hooks would fetch and drop each layer's weights all the same, in step with the other ranks.
        offload = self._deepspeed.optimizer.parameter_offload
        for hook in (*offload.forward_hooks, *offload.backward_hooks):
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        try:
            with import_deepspeed().zero.GatheredParameters(list(self._module.parameters())):
                yield
        finally:
            offload._register_deepspeed_module(offload.module)

    def save(self, folder: Path) -> None:
        """Writes weights that train, optimizer state, schedule and the world size; every rank calls it."""
        own: dict[str, Any] = {"steps": self.steps, "scale": self._scale, "world": self.world}
        own |= {
            "parts": self.params.tensor_parallel,
            "nonfinite": [self.nonfinite, self.nonfinite_total],
        }
        if self.first:
            folder.mkdir(parents=True, exist_ok=True)
        self.barrier()
        if self._deepspeed is not None:
            self._deepspeed.save_checkpoint(str(folder), tag="engine", exclude_frozen_parameters=True)
        elif self.first:
            trained = {n: p.detach() for n, p in self._module.named_parameters() if p.requires_grad}
            torch.save({"module": trained, "optimizer": self._optimizer.state_dict()}, folder / "engine.pt")
        if self.first:
            torch.save(own, folder / "schedule.pt")
        self.barrier()

    def unlike(self, state: Any) -> str:
        """What a file of `save`, read back, has of the trained weights that is not theirs bit for bit: a name
        and the fault, or nothing. The same weights give the same logits, so none are computed. Not seen:
        weights in parts (ZeRO-3, tensor parallel)."""
        module = state.get("module") if isinstance(state, Mapping) else None
        if not module or self.params.zero == 3 or self.params.tensor_parallel > 1:
            return ""
        for name, own in self._module.named_parameters():
            if own.requires_grad:
                if name not in module:
                    return f"{name} is missing"
                if module[name].numel() == 0:
                    return f"{name} is empty"
                if not torch.equal(module[name], own.detach().to(module[name].device)):
                    return f"{name} is not what was trained"
        return ""

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote, bit for bit; another number of ranks is refused."""
        own = torch.load(folder / "schedule.pt", weights_only=True)
        parts = self.params.tensor_parallel
        if (own["world"], own["parts"]) != (self.world, parts):
            ranks = own["world"] * own["parts"]
            raise ConfigurationError(
                f"{folder}: written by {ranks} ranks, engine.tensor_parallel {own['parts']}, now there are "
                f"{self.world * parts} and {parts}; resume with processes: {ranks}, or remove the run's work "
                "folder to start anew"
            )
        if self._deepspeed is not None:
            path, _ = self._deepspeed.load_checkpoint(
                str(folder), tag="engine", load_module_strict=False, load_lr_scheduler_states=False
            )
            if path is None:
                raise ConfigurationError(
                    f"{folder}: no DeepSpeed state; it was written by another engine.backend"
                )
        else:
            state = torch.load(folder / "engine.pt", map_location="cpu", weights_only=True)
            with torch.no_grad():
                for name, parameter in self._module.named_parameters():
                    if parameter.requires_grad:
                        parameter.copy_(state["module"][name])
            self._optimizer.load_state_dict(state["optimizer"])
        self.steps, self._scale = own["steps"], own["scale"]
        self.nonfinite, self.nonfinite_total = own["nonfinite"]


def _groups(
    module: nn.Module, weight_decay: float, fast: set[int], fast_factor: float
) -> list[dict[str, Any]]:
    """Parameter groups: matrices decay, vectors (biases, norms) don't; a new head learns faster."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            # ZeRO-3 leaves an empty shell whose ds_shape remembers the form.
            shape = getattr(parameter, "ds_shape", parameter.shape)
            key = (
                weight_decay if len(shape) >= 2 else 0.0,
                fast_factor if id(parameter) in fast else 1.0,
            )
            groups.setdefault(key, []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "decay": decay, "factor": factor}
        for (decay, factor), parameters in groups.items()
    ]


def _norm(gradients: Sequence[Tensor]) -> float:
    """Global norm in float64: squares of float32 gradients may overflow where the gradient itself does
    not. In pieces that stay in a core's cache: no wide copy of a whole matrix is made."""
    pieces = (part.double() for g in gradients for part in torch.split(g.reshape(-1), NORM_PIECE))
    squares = [torch.dot(piece, piece) for piece in pieces]
    return math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0


def _clip(gradients: Sequence[Tensor], norm: float, bound: float) -> None:
    if norm > bound:
        for gradient in gradients:
            gradient.mul_(bound / norm)
