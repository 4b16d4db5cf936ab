"""DPO's loss beside TRL's, on TRL's own path: `python -m infra.evidence.dpo_beside_trl --model FOLDER`.

TRL's DPOTrainer trains on hh_rlhf in float32. Before each of its steps its weights are loaded into ours and
the same batch is given to training.preference.train_step: the two losses, and the two gradients, are of the
same weights and rows, however many steps were done before. The references are each side's own, both of the
weights at the start.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from infra.bench.ours import our_engine, our_settings
from infra.bench.side import tiny_model
from infra.bench.theirs import trl_trainer
from infra.bench.work import BATCH, BETA, fitting
from training import preference
from training.batches import cannot_share
from training.chat import load_tokenizer
from training.config_optimize import OptimizeParams
from training.engine import connect
from training.logprobs import AnswerLogprobs
from training.models import load_policy
from training.reference import Forward
from training.rundir import seed_everything, write_json

BOUND = 1e-4


class Ours:
    """Our side: the program's own step function without its optimizer."""

    def __init__(self, spec: dict[str, Any], tok: Any) -> None:
        self.params = OptimizeParams(
            algorithm="dpo", prompts=spec["batch"], beta=BETA["dpo"], temperature=1.0,
            **our_settings(spec),
        )  # fmt: skip
        items = fitting(tok, spec)
        self.model = load_policy(spec["model"], self.params.precision, None)
        engine = our_engine(AnswerLogprobs(self.model), self.params)
        shared = cannot_share(self.model) is None
        forward = Forward(engine, int(tok.pad_token_id), shared, self.params.token_budget, 1.0, "fp32")
        ref = forward.logps([item.tree for item in items])
        self.trainer: Any = preference.Trainer(None, self.params, engine, forward, items, ref, [], [])  # type: ignore[arg-type]

    def loss(self, weights: Mapping[str, torch.Tensor], step: int) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss of a step's rows at these weights, and the gradient by parameter."""
        self.model.load_state_dict(weights)
        self.model.zero_grad()
        batch = self.params.prompts
        sums, _ = preference.train_step(self.trainer, range(step * batch, (step + 1) * batch))
        return sums[0], gradient(self.model)


def gradient(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of what stands in .grad."""
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def compare(spec: dict[str, Any]) -> Iterator[dict[str, float]]:
    """Figures of each step."""
    from torch.utils.data import SequentialSampler

    tok = load_tokenizer(spec["model"])
    ours, other = Ours(spec, tok), trl_trainer(spec, tok, [])
    other._get_train_sampler = lambda *args, **kwargs: SequentialSampler(other.train_dataset)
    training_step = other.training_step
    found: list[dict[str, float]] = []

    def beside(model: Any, *rest: Any, **named: Any) -> Any:
        loss, grads = ours.loss(model.state_dict(), len(found))
        theirs = training_step(model, *rest, **named)
        shared = gradient(model)
        whole, apart = (
            sum(float((one.double() ** 2).sum()) for one in part) ** 0.5
            for part in (shared.values(), [grads[name] - one for name, one in shared.items()])
        )
        found.append(
            {
                "step": len(found) + 1, "ours": loss, "trl": float(theirs),
                "gap": abs(loss - float(theirs)), "gradient_gap": apart / whole,
            }
        )  # fmt: skip
        print(json.dumps(found[-1]), flush=True)
        return theirs

    other.training_step = beside
    other.train()
    yield from found


def main() -> int:
    """Prints a line a step; returns 1 when a loss is further apart than BOUND."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of a causal LM; without it a tiny random one")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with hh_rlhf/")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("infra/evidence"))
    args = parser.parse_args()
    real, sample = args.data / "hh_rlhf" / "harmless-base.jsonl", Path("data/sample/preferences.jsonl")
    torch.set_num_threads(args.threads)
    seed_everything(0)
    connect()
    with tempfile.TemporaryDirectory(prefix="plumbline-dpo-") as folder:
        spec = {
            "folder": folder, "model": args.model or tiny_model(Path(folder) / "tiny"), "task": "dpo",
            "threads": args.threads, "steps": args.steps, "batch": BATCH["dpo"], "backend": "torch",
            "precision": "fp32", "pairs": str(real if real.exists() else sample),
        }  # fmt: skip
        steps = list(compare(spec))
    worst = max(step["gap"] for step in steps)
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "dpo_beside_trl.json", {"model": args.model and Path(args.model).name,
               "bound": BOUND, "worst": worst, "steps": steps})  # fmt: skip
    print(f"largest gap of the losses over {len(steps)} steps: {worst:.2e} (bound {BOUND:g})")
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
