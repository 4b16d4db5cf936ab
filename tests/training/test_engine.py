from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from data.errors import ConfigurationError
from tests.training.tiny import gpt2, llama
from training import engine as engine_module
from training import launch, losses
from training.batches import Tree, collate, deal, plan
from training.config import EngineParams, LoraParams
from training.device import autocast
from training.engine import NORM_PIECE, Engine
from training.generate import BuiltinGenerator
from training.logprobs import AnswerLogprobs
from training.models import add_lora

OPTIONS: dict[str, Any] = {
    "lr": 1e-2, "total_steps": 6, "warmup": 0.2, "min_lr_share": 0.1, "weight_decay": 0.1, "clip_norm": 0.5,
}  # fmt: skip


def rows(step: int, count: int = 7) -> list[Tree]:
    generator = torch.Generator().manual_seed(step)

    def ids(length: int) -> list[int]:
        return [int(i) for i in torch.randint(2, 250, (length,), generator=generator)]

    return [Tree(str(n), ids(4 + n), [ids(2 + 5 * (n % 3)), ids(1)]) for n in range(count)]


def train(
    engine: Engine,
    steps: range,
    budget: int = 60,
    shared: bool = True,
    poison: int | None = None,
    bf16: bool = False,
) -> list[tuple[float, float, bool]]:
    """Loss, gradient norm and finiteness of each step."""
    seen = []
    for step in steps:
        trees = rows(step)
        count = sum(len(answer) for tree in trees for answer in tree.answers)
        micro = deal(plan(trees, budget, shared), engine.rank, engine.world)
        total = 0.0
        for number, (indices, real) in enumerate(micro, 1):
            batch = collate([trees[index] for index in indices], 1, shared)
            with autocast("bf16" if bf16 else "fp32"):
                logp, _ = engine.module(batch)
            loss = losses.cross_entropy(logp, batch.mask, count=count).loss * float(real)
            engine.backward(loss * math.nan if poison == step else loss, last=number == len(micro))
            total += float(loss.detach())
        info = engine.step()
        seen.append((engine.sum([total])[0], info.grad_norm, info.finite))
    return seen


def build(
    params: dict[str, Any], lora: bool = False, narrow: bool = False, tied: bool = True,
    heads: int = 2, **options: Any,
) -> tuple[Engine, Any]:  # fmt: skip
    model: Any = llama(tied=tied, num_key_value_heads=heads)
    if lora:
        torch.manual_seed(3)
        model = add_lora(model, LoraParams(rank=4))
    if narrow:
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
    return Engine(AnswerLogprobs(model), EngineParams(**params), **{**OPTIONS, **options}), model


def weights(engine: Engine, model: Any) -> dict[str, Tensor]:
    state = engine.full_state(model)
    return {k: v.clone() for k, v in (state if state is not None else model.state_dict()).items()}


def test_learning_rate_rises_linearly_then_falls_as_a_cosine() -> None:
    engine, _ = build({"backend": "torch"}, total_steps=10, warmup=0.2, lr=1.0)
    rates = []
    for step in range(12):
        engine.steps = step
        rates.append(engine.lr())
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.1 + 0.9 * 0.5, abs=1e-12), "half way down"
    assert rates[10] == rates[11] == pytest.approx(0.1)
    engine.scale_lr(0.5)
    assert engine.lr() == pytest.approx(0.05) and engine.lr_scale == 0.5


def gradient(budget: int, shared: bool) -> list[Tensor]:
    model = gpt2().double()
    engine = Engine(AnswerLogprobs(model), EngineParams(backend="torch"), **OPTIONS)
    engine._optimizer.step = lambda: None  # type: ignore[assignment,misc,method-assign]
    engine._optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
    engine._clip = math.inf
    train(engine, range(1), budget, shared)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_any_split_gives_the_same_gradient() -> None:
    whole = gradient(10_000, shared=False)
    for budget, shared in ((1, False), (60, False), (1, True), (77, True), (10_000, True)):
        for left, right in zip(whole, gradient(budget, shared), strict=True):
            assert torch.allclose(left, right, rtol=1e-9, atol=1e-13)


def test_a_mean_of_means_would_be_another_number() -> None:
    """Micro batches of losses [1, 1] and [3] * 8: mean of means 2.0, token mean 2.6."""
    parts = [torch.tensor([[-1.0, -1.0]]), torch.full((1, 8), -3.0)]
    masks = [torch.ones_like(part, dtype=torch.bool) for part in parts]
    total = sum(float(losses.cross_entropy(p, m, count=10).loss) for p, m in zip(parts, masks, strict=True))
    assert total == pytest.approx(2.6, abs=1e-6)


def test_vectors_do_not_decay_and_a_new_head_may_learn_faster() -> None:
    layer = torch.nn.Linear(3, 2)
    options = {**OPTIONS, "warmup": 0.0}
    engine = Engine(layer, EngineParams(backend="torch"), fast=[layer.weight], fast_factor=10.0, **options)
    groups = {group["params"][0].dim(): group for group in engine._optimizer.param_groups}
    assert groups[2]["weight_decay"] == 0.1 and groups[1]["weight_decay"] == 0.0
    engine.backward(layer(torch.ones(1, 3)).sum(), last=True)
    engine.step()
    assert groups[2]["lr"] == pytest.approx(0.1) and groups[1]["lr"] == pytest.approx(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_deepspeed_takes_the_same_steps_as_torch(tmp_path: Path, zero: int, lora: bool) -> None:
    plain, model = build({"backend": "torch"}, lora)
    expected = train(plain, range(6))
    goal = weights(plain, model)
    engine, model = build({"zero": zero}, lora)
    found = train(engine, range(3))
    engine.save(tmp_path)
    rest = train(engine, range(3, 6))
    for left, right in zip(expected, found + rest, strict=True):
        assert left == pytest.approx(right, rel=1e-4)
    mine = weights(engine, model)
    for name, tensor in mine.items():
        assert torch.allclose(tensor, goal[name], atol=2e-5), name
    again, model = build({"zero": zero}, lora)
    again.load(tmp_path)
    assert again.steps == 3 and train(again, range(3, 6)) == rest, "resuming is bit-identical"
    assert all(torch.equal(tensor, mine[name]) for name, tensor in weights(again, model).items())


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_deepspeed_does_not_step_into_a_nan(zero: int) -> None:
    calm, model = build({"zero": zero})
    train(calm, range(1))
    before = weights(calm, model)
    engine, model = build({"zero": zero})
    assert [finite for _, _, finite in train(engine, range(2), poison=1)] == [True, False]
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine, model).items())
    assert train(engine, range(2, 3))[0][2], "the next step is clean: no gradient was left over"


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_narrow_frozen_base_under_autocast(zero: int) -> None:
    plain, _ = build({"backend": "torch"}, lora=True, narrow=True)
    expected = train(plain, range(4), bf16=True)
    engine, _ = build({"zero": zero}, lora=True, narrow=True)
    for left, right in zip(expected, train(engine, range(4), bf16=True), strict=True):
        assert left == pytest.approx(right, rel=1e-2), "bfloat16 rounds at 1 in 256"


@pytest.mark.slow
def test_deepspeed_refuses_float64() -> None:
    with pytest.raises(ConfigurationError, match="backend: torch"):
        Engine(AnswerLogprobs(gpt2().double()), EngineParams(), **OPTIONS)


HALVES = """
import sys, torch
from tests.training.test_engine import gradient
from training.engine import connect
torch.set_num_threads(1)
rank, _ = connect()
found = gradient(60, True)
if rank == 0:
    torch.save(found, sys.argv[1])
"""


@pytest.mark.slow
def test_two_ranks_have_the_gradient_of_one_in_float64(tmp_path: Path) -> None:
    script, out = tmp_path / "halves.py", tmp_path / "out.pt"
    script.write_text(HALVES)
    torchrun(script, str(out))
    for left, right in zip(gradient(10_000, False), torch.load(out), strict=True):
        assert torch.allclose(left, right, rtol=1e-9, atol=1e-13)


def torchrun(script: Path, *arguments: str, ranks: int = 2) -> None:
    """Runs a script on some ranks."""
    root = Path(__file__).resolve().parents[2]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--rdzv-backend",
        "c10d",
    ]
    command += ["--rdzv-endpoint", "127.0.0.1:0", str(script), *arguments]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=root, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


RANKS = """
import sys, torch
from pathlib import Path
from tests.training.test_engine import build, train, weights
from training.engine import connect
torch.set_num_threads(1)
rank, world = connect()
params = {"backend": "torch"} if sys.argv[1] == "torch" else {"zero": int(sys.argv[1])}
engine, model = build(params)
seen = train(engine, range(4))
state = weights(engine, model)
if rank == 0:
    torch.save((seen, state), sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "0", "1", "2", "3"])
def test_two_ranks_take_the_same_steps_as_one(tmp_path: Path, backend: str) -> None:
    script, out = tmp_path / "ranks.py", tmp_path / "out.pt"
    script.write_text(RANKS)
    torchrun(script, backend, str(out))
    seen, state = torch.load(out)
    engine, model = build({"backend": "torch"})
    for left, right in zip(train(engine, range(4)), seen, strict=True):
        assert left == pytest.approx(right, rel=1e-4)
    for name, tensor in weights(engine, model).items():
        if name in state:
            assert torch.allclose(tensor, state[name], atol=2e-5), name


PARTS = """
import sys, torch
from pathlib import Path
from tests.training.test_engine import build, train, weights
from training.engine import connect
torch.set_num_threads(1)
process, processes = connect()
params = {"zero": int(sys.argv[1]), "tensor_parallel": 2}
engine, model = build(params, tied=sys.argv[3] == "tied")
assert (engine.rank, engine.world) == (process // 2, processes // 2), "neighbours compute the same rows"
assert engine.sum([3.0, float(process == 1)]) == [1.5 * processes, 0.5], "what one of two has seen, both know"
shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
seen = train(engine, range(2))
folder = Path(sys.argv[2]).parent / "checkpoint"
engine.save(folder)
seen += train(engine, range(2, 4))
state = weights(engine, model)
again, model = build(params, tied=sys.argv[3] == "tied")
again.load(folder)
assert train(again, range(2, 4)) == seen[2:], "resuming is bit-identical"
if engine.first:
    torch.save((seen, state, shapes), sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "zero", "tied"), [(2, 1, True), (2, 2, False), (4, 1, False)])
def test_ranks_that_hold_one_model_together_take_the_same_steps_as_one(
    tmp_path: Path, ranks: int, zero: int, tied: bool
) -> None:
    script, out = tmp_path / "parts.py", tmp_path / "out.pt"
    script.write_text(PARTS)
    torchrun(script, str(zero), str(out), "tied" if tied else "apart", ranks=ranks)
    seen, state, shapes = torch.load(out)
    engine, model = build({"backend": "torch"}, tied=tied)
    for left, right in zip(train(engine, range(4)), seen, strict=True):
        assert left == pytest.approx(right, rel=1e-4)
    whole = dict(model.named_parameters())
    assert state.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.allclose(tensor, state[name], atol=2e-5), name
    name = "model.layers.0.mlp.down_proj.weight"
    assert shapes[name] == (32, 32) and whole[name].shape == (32, 64), "half of the matrix a rank"


UNEVEN = """
import sys, torch
from tests.training.test_engine import build, train
from training.engine import connect
from training.generate import BuiltinGenerator
torch.set_num_threads(1)
rank, _ = connect()
engine, model = build({"zero": 3}, lora=True)
train(engine, range(1))
maker = BuiltinGenerator(model, [1], 1, gathered=engine.gathered)
# Ranks have other prompts and lengths, so they are never in step.
prompts = [[5, 6, 7], [8, 9]][: 1 + rank]
made = maker.generate(prompts, 2, max_new_tokens=3 + 4 * rank, temperature=1.0, keys=["a", "b"][: 1 + rank])
train(engine, range(1, 2))
if rank == 1:
    torch.save(made.answers, sys.argv[1])
"""


@pytest.mark.slow
def test_ranks_with_sharded_weights_generate_at_their_own_pace(tmp_path: Path) -> None:
    script, out = tmp_path / "uneven.py", tmp_path / "out.pt"
    script.write_text(UNEVEN)
    torchrun(script, str(out))
    engine, model = build({"backend": "torch"}, lora=True)
    train(engine, range(1))
    made = BuiltinGenerator(model, [1], 1).generate(
        [[5, 6, 7], [8, 9]], 2, max_new_tokens=7, temperature=1.0, keys=["a", "b"]
    )
    assert torch.load(out) == made.answers


def test_heads_must_be_dealt_out_evenly() -> None:
    with pytest.raises(ConfigurationError, match=r"does not divide the model's num_key_value_heads \(1\)"):
        build({"zero": 1, "tensor_parallel": 2}, heads=1)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_lies_in_cpu_memory_changes_no_step(zero: int) -> None:
    plain, _ = build({"backend": "torch"})
    expected = train(plain, range(3))
    engine, _ = build({"zero": zero, "offload": True})
    for left, right in zip(expected, train(engine, range(3)), strict=True):
        assert left == pytest.approx(right, rel=1e-4)


class Widest(TorchDispatchMode):
    """Remembers the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.float64:
            self.numel = max(self.numel, out.numel())
        return out


def test_the_norm_of_a_gradient_needs_no_wide_copy_of_it() -> None:
    gradients = [torch.full((3, 2 * NORM_PIECE), 1e30), torch.ones(2, 3).T, torch.zeros(0)]
    with Widest() as seen:
        norm = engine_module._norm(gradients)
    assert norm == pytest.approx(1e30 * math.sqrt(6 * NORM_PIECE), rel=1e-7), (
        "in float32 it would be infinite"
    )
    assert seen.numel <= NORM_PIECE
    assert engine_module._norm([torch.ones(2, 3).T]) == pytest.approx(math.sqrt(6), abs=1e-15)
    assert engine_module._norm([]) == 0.0
    for bad in (math.nan, math.inf):
        assert not math.isfinite(engine_module._norm([torch.ones(4), torch.tensor([1.0, bad])]))


def test_workers_find_huge_pages_and_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"})
    launch._environment()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"
    assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=1"
