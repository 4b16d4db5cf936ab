"""TRL's side of each task: its own trainer, held before and after each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from infra.bench.work import (
    BETA,
    CENTRING,
    GROUP,
    LR,
    MAX_LENGTH,
    NEW_TOKENS,
    decoding,
    fitting,
    prompt_rows,
    tokens_of,
    vowels,
)


def trl_trainer(spec: dict[str, Any], tok: Any, counts: list[int]) -> Any:
    """TRL's trainer of a task on the same ids; `counts` gets the data's tokens of each step."""
    import trl
    from datasets import Dataset

    common: dict[str, Any] = {
        "output_dir": spec["folder"] + "/trl", "per_device_train_batch_size": spec["batch"],
        "max_steps": spec["steps"], "learning_rate": LR, "lr_scheduler_type": "constant",
        "weight_decay": 0.0, "max_grad_norm": 1.0, "use_cpu": True, "bf16": spec["precision"] == "bf16",
        "gradient_checkpointing": False, "save_strategy": "no", "logging_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False, "seed": 0,
        "model_init_kwargs": {"dtype": "float32"},
    }  # fmt: skip
    task, batch = spec["task"], spec["batch"]
    if task in ("grpo", "rloo"):
        prompts = [[message.model_dump() for message in row.prompt] for row in prompt_rows(spec)]
        common |= {
            "per_device_train_batch_size": batch * GROUP, "num_generations": GROUP, "beta": BETA[task],
            "max_completion_length": NEW_TOKENS, "temperature": 1.0, "shuffle_dataset": False,
        }  # fmt: skip

        def reward(prompts: Any, completions: Any, completion_ids: Any, **rest: Any) -> list[float]:
            asked = prompts[::GROUP]
            rendered = tok.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)
            counts.append(sum(map(len, rendered["input_ids"])) + sum(map(len, completion_ids)))
            return [vowels(None, completion[0]["content"], None, {}) for completion in completions]

        config = trl.GRPOConfig(loss_type="grpo", **common) if task == "grpo" else trl.RLOOConfig(**common)
        kind = trl.GRPOTrainer if task == "grpo" else trl.RLOOTrainer
        return kind(
            model=spec["model"], args=config, reward_funcs=reward, processing_class=tok,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        )  # fmt: skip
    trees = [item.tree for item in fitting(tok, spec)]
    if task == "sft":
        rows = [
            {"input_ids": t.prompt + t.answers[0], "labels": [-100] * len(t.prompt) + t.answers[0]}
            for t in trees
        ]
        sizes = [len(row["input_ids"]) for row in rows]
        config, kind = trl.SFTConfig(max_length=MAX_LENGTH, **common), trl.SFTTrainer
    elif task == "reward":
        from training.batches import step_rows

        order = [at for step in range(spec["steps"]) for at in step_rows(len(trees), batch, 0, step)]
        trees = [trees[at] for at in order]
        rows = [
            {"chosen_ids": t.prompt + t.answers[0], "rejected_ids": t.prompt + t.answers[1]} for t in trees
        ]
        sizes = list(map(tokens_of, trees))
        # Its model finds an answer's last token by id, so padding with EOS would move it.
        other = next(name for name in tok.all_special_tokens if name != tok.eos_token)
        config = trl.RewardConfig(
            max_length=MAX_LENGTH, center_rewards_coefficient=CENTRING, pad_token=other, **common
        )
        kind = trl.RewardTrainer
    else:
        rows = [
            {"prompt_ids": t.prompt, "chosen_ids": t.answers[0], "rejected_ids": t.answers[1]} for t in trees
        ]
        sizes = list(map(tokens_of, trees))
        config = trl.DPOConfig(max_length=MAX_LENGTH, beta=BETA["dpo"], **common)

        class Encoded(trl.DPOTrainer):  # type: ignore[misc]
            """Takes ids as they are: TRL's own would tokenise text again."""

            def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
                return dataset

        kind = Encoded
    counts += [sum(sizes[start : start + batch]) for start in range(0, len(sizes), batch)]
    dataset = Dataset.from_list(rows)
    trainer = kind(model=spec["model"], args=config, train_dataset=dataset, processing_class=tok)
    if task == "reward":
        import torch

        from training.reward import head_seed
        from training.score import Member

        with torch.no_grad():  # the same fresh head as ours
            head = Member(trainer.model.model, "causal", 1, head_seed(0, 0)).head
            trainer.model.score.weight.copy_(head)
    return trainer


def run_trl(spec: dict[str, Any], tok: Any, turn: Callable[[], None], reply: Callable[..., None]) -> None:
    """Trains; before each step waits for its turn, after it replies."""
    from torch.utils.data import SequentialSampler
    from transformers import TrainerCallback

    counts: list[int] = []
    losses: list[float] = []
    trainer = trl_trainer(spec, tok, counts)
    if spec["task"] not in ("grpo", "rloo"):
        trainer._get_train_sampler = lambda *args, **kwargs: SequentialSampler(trainer.train_dataset)
    training_step = trainer.training_step

    def remembered(*args: Any, **kwargs: Any) -> Any:
        loss = training_step(*args, **kwargs)
        losses.append(float(loss))
        return loss

    trainer.training_step = remembered
    if spec["task"] in ("grpo", "rloo"):
        generate = trainer.model.generate

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            found = generate(*args, **kwargs)
            decoding.append(time.perf_counter() - began)
            return found

        trainer.model.generate = timed

    class Turns(TrainerCallback):  # type: ignore[misc]
        began = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            turn()
            self.began = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds = time.perf_counter() - self.began
            reply(seconds, losses[-1], counts[len(losses) - 1])

    trainer.add_callback(Turns())
    trainer.train()
