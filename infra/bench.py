"""Our training steps against TRL's, side by side on this machine's CPU: `python -m infra.bench`.

Each side of a comparison runs in a process of its own, so that peak memory is its own. The two take turns: a
step of ours, a step of TRL's, on the same rows (the same ids), weights, batch, learning rate and token limit,
so that a busy machine hits both. A step is everything from the rows to the moved weights: for DPO the
reference's pass over the step's rows is in it on both sides, for GRPO and RLOO sampling and scoring too. No
adapters, float32 weights, no gradient checkpointing, on either side. The first pair of steps warms up and is
not counted, unless it is the only one. Loading, and fetching rows, are outside the timing.

Ours are the programs' own step functions (training.sft.train_step, training.reward.train_step,
training.preference.train_step, training.rl.step_once), with the shipped token budgets, in
the environment that training.launch gives them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from training.launch import ALLOCATOR

# torch and the like are imported where they are used: the parent of the measured processes stays small, as a
# child's peak memory can't be read below what its parent had.

TASKS = ("sft", "reward", "dpo", "grpo", "rloo")
BATCH = {"sft": 8, "reward": 8, "dpo": 4, "grpo": 1, "rloo": 1}
"""Rows, pairs or prompts a step; samples a prompt are `GROUP`."""
GROUP, NEW_TOKENS, MAX_LENGTH, MAX_PROMPT = 8, 64, 512, 384
LR, BETA, CENTRING = 1e-5, {"dpo": 0.1, "grpo": 0.05, "rloo": 0.05}, 0.01
COMPARABLE = ("sft", "reward", "dpo")
"""Where both sides see the same tokens; on-policy samples are each side's own."""
PASSES = {"sft": 6, "reward": 6, "dpo": 8, "grpo": 10, "rloo": 10}
"""Floating point operations a weight and token: 6 for forward and backward, 2 for each pass more (reference,
sampling). Attention, embedding and head are left out, so a share of the peak is a lower bound."""


decoding: list[float] = []
"""Seconds of each sampling pass in this process; empty where nothing is sampled."""


def vowels(prompt: Any, answer: str, reference: str | None, extra: dict[str, Any]) -> float:
    """The reward of both sides: share of vowels. Cheap, and it differs within a group."""
    return sum(letter in "aeiou" for letter in answer.lower()) / max(1, len(answer))


# -- rows ----------------------------------------------------------------------------------------------------


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def dialogue(text: str) -> list[dict[str, str]]:
    """hh_rlhf's text as messages."""
    parts = re.split(r"\n\n(Human|Assistant):", text)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[role], "content": said.strip()}
        for role, said in zip(parts[0::2], parts[1::2], strict=True)
    ]


def pair_rows(spec: dict[str, Any]) -> list[Any]:
    """Preference records of hh_rlhf, or of the shipped sample."""
    from data.records import Message, Preference

    found = []
    for number, row in enumerate(lines(Path(spec["pairs"]))):
        if "prompt" in row:
            given, chosen, rejected = row["prompt"], row["chosen"], row["rejected"]
            turns = [{"role": "user", "content": given}] if isinstance(given, str) else given
        else:
            first, second = dialogue(row["chosen"]), dialogue(row["rejected"])
            turns, chosen, rejected = first[:-1], first[-1]["content"], second[-1]["content"]
            if turns != second[:-1]:
                continue
        wanted = ["user", "assistant"] * len(turns)
        if [turn["role"] for turn in turns] != wanted[: len(turns)] or len(turns) % 2 == 0:
            continue
        if chosen and rejected and chosen != rejected:
            prompt = tuple(Message(role=turn["role"], content=turn["content"]) for turn in turns)
            found.append(
                Preference(prompt=prompt, id=f"{number:016x}", group="", chosen=chosen, rejected=rejected)
            )
    return found


def fitting(tok: Any, spec: dict[str, Any]) -> list[Any]:
    """The first pairs that no limit would cut, as many as the run takes, as ids."""
    from training.config_optimize import OptimizeParams, PreferenceParams
    from training.pairs import encode

    params = OptimizeParams(
        algorithm="dpo", max_prompt=MAX_PROMPT, preference=PreferenceParams(max_length=MAX_LENGTH)
    )
    items, _ = encode(tok, pair_rows(spec), params)
    need = spec["steps"] * spec["batch"]
    if len(items) < need:
        raise SystemExit(f"{spec['pairs']}: {len(items)} pairs within {MAX_LENGTH} tokens, {need} needed")
    return items[:need]


def prompt_rows(spec: dict[str, Any]) -> list[Any]:
    """Prompts of gsm8k, or of the shipped sample's pairs, in the order in which training.rl draws them."""
    from data.records import Message, Prompt
    from training.rl import draw

    texts = [str(row.get("question", "")) for row in lines(Path(spec["prompts"]))]
    if not any(texts):
        texts = [row.prompt[-1].content for row in pair_rows({**spec, "pairs": spec["prompts"]})]
    need = spec["steps"] * spec["batch"]
    short = [text for text in texts if len(text) < MAX_PROMPT - 64][:need]
    if len(short) < need:
        raise SystemExit(f"{spec['prompts']}: {len(short)} short prompts, {need} needed")
    rows = [
        Prompt(prompt=(Message(role="user", content=text),), id=f"{number:016x}", group="")
        for number, text in enumerate(short)
    ]
    order = [at for step in range(spec["steps"]) for at in draw(need, spec["batch"], 0, step * spec["batch"])]
    return [rows[at] for at in order]


# -- ours ----------------------------------------------------------------------------------------------------

Step = Callable[[int], tuple[float, float, int]]
"""Number of a step to seconds, loss and the data's tokens."""


def our_settings(spec: dict[str, Any]) -> dict[str, Any]:
    """What all sections share."""
    from training.config import EngineParams

    return {
        "lr": LR, "warmup": 0.0, "min_lr_share": 1.0, "weight_decay": 0.0, "clip_norm": 1.0, "lora": None,
        "precision": spec["precision"], "threads": spec["threads"],
        "engine": EngineParams(backend=spec["backend"]),
    }  # fmt: skip


def our_engine(module: Any, params: Any) -> Any:
    from training.engine import Engine

    return Engine(
        module, params.engine, lr=params.lr, total_steps=1000, warmup=params.warmup,
        min_lr_share=params.min_lr_share, weight_decay=params.weight_decay, clip_norm=params.clip_norm,
    )  # fmt: skip


def our_sft(spec: dict[str, Any], tok: Any) -> Step:
    from training import sft
    from training.batches import Tree, cannot_share
    from training.config import SftParams
    from training.logprobs import AnswerLogprobs
    from training.models import load_policy
    from training.reference import Forward

    trees = [Tree(item.tree.key, item.tree.prompt, item.tree.answers[:1]) for item in fitting(tok, spec)]
    params = SftParams(batch=spec["batch"], max_length=MAX_LENGTH, **our_settings(spec))
    model = load_policy(spec["model"], params.precision, None)
    engine = our_engine(AnswerLogprobs(model), params)
    shared = cannot_share(model) is None
    forward = Forward(engine, int(tok.pad_token_id), shared, params.token_budget, 1.0, params.precision)

    def step(number: int) -> tuple[float, float, int]:
        rows = trees[number * params.batch :][: params.batch]
        began = time.perf_counter()
        loss, _ = sft.train_step(forward, rows, params)
        engine.step()
        return time.perf_counter() - began, loss, sum(map(tokens_of, rows))

    return step


def tokens_of(tree: Any) -> int:
    """Tokens of a prompt, once, and of its answers."""
    return len(tree.prompt) + sum(map(len, tree.answers))


def our_reward(spec: dict[str, Any], tok: Any) -> Step:
    from training import reward
    from training.batches import cannot_share, step_rows
    from training.config import RewardParams
    from training.models import device

    params = RewardParams(
        model="policy", batch=spec["batch"], max_length=MAX_LENGTH, centring=CENTRING, **our_settings(spec)
    )
    items = fitting(tok, spec)
    pairs = [reward.Pair(item.tree.prompt, tuple(item.tree.answers), [1.0]) for item in items]
    members, kind = reward.build_members(Path(spec["model"]), params, 0)
    shared = kind == "causal" and cannot_share(members[0].backbone) is None
    engine = our_engine(reward.Ensemble(members).to(device()).train(), params)

    def step(number: int) -> tuple[float, float, int]:
        began = time.perf_counter()
        loss, _ = reward.train_step(engine, pairs, params, int(tok.pad_token_id), shared, 0, number)
        engine.step()
        seconds = time.perf_counter() - began
        rows = step_rows(len(pairs), params.batch, 0, number)
        return seconds, loss, sum(tokens_of(items[row].tree) for row in rows)

    return step


def our_dpo(spec: dict[str, Any], tok: Any) -> Step:
    """The reference is the untouched policy, so it is asked before the first update; the seconds that it
    takes for a step's rows are counted in that step."""
    from dataclasses import replace

    from training import preference
    from training.batches import cannot_share
    from training.config_optimize import OptimizeParams
    from training.logprobs import AnswerLogprobs
    from training.models import load_policy
    from training.reference import Forward, choose_layout

    params = OptimizeParams(
        algorithm="dpo", prompts=spec["batch"], beta=BETA["dpo"], temperature=1.0, **our_settings(spec)
    )
    items = fitting(tok, spec)
    model = load_policy(spec["model"], params.precision, None)
    engine = our_engine(AnswerLogprobs(model), params)
    forward = Forward(engine, int(tok.pad_token_id), True, params.token_budget, 1.0, params.precision)
    trees = [item.tree for item in items]
    shared, _ = choose_layout(forward, trees, cannot_share(model))
    forward = replace(forward, shared=shared)
    ref, asked = [], []
    for number in range(spec["steps"]):
        began = time.perf_counter()
        ref += forward.logps(trees[number * spec["batch"] :][: spec["batch"]])
        asked.append(time.perf_counter() - began)
    trainer: Any = preference.Trainer(None, params, engine, forward, items, ref, [], [])  # type: ignore[arg-type]

    def step(number: int) -> tuple[float, float, int]:
        rows = range(number * spec["batch"], (number + 1) * spec["batch"])
        began = time.perf_counter()
        sums, _ = preference.train_step(trainer, rows)
        engine.step()
        seconds = time.perf_counter() - began + asked[number]
        return seconds, sums[0], sum(tokens_of(trees[row]) for row in rows)

    return step


def our_rl(spec: dict[str, Any], tok: Any) -> Step:
    from data.records import to_line
    from training import rl
    from training.config_guards import GuardParams
    from training.config_optimize import KlParams, OptimizeParams
    from training.config_rewards import RewardsParams, ScorerParams
    from training.rundir import RunDir

    scorer = ScorerParams(kind="function", name="vowels", path="infra.bench:vowels")
    off = [name for name, field in GuardParams.model_fields.items() if type(None) in _parts(field.annotation)]
    in_loss = spec["task"] == "grpo"
    params = OptimizeParams(
        algorithm=spec["task"], prompts=spec["batch"], group=GROUP, max_new_tokens=NEW_TOKENS, steps=1000,
        beta=BETA[spec["task"]], held_out=0, checkpoint_every=1000,
        kl=KlParams(where="loss" if in_loss else "reward", estimator="k3" if in_loss else "k1"),
        rewards=RewardsParams(scorers=(scorer,), penalty=0.0),
        guards=GuardParams(**dict.fromkeys(off)), **our_settings(spec),
    )  # fmt: skip
    folder = Path(spec["folder"]) / "ours"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.jsonl").write_text("".join(map(to_line, prompt_rows(spec))), encoding="utf-8")
    inputs = {"model": spec["model"], "prompts": str(folder / "prompts.jsonl")}
    config = {
        "stage": "bench", "program": "training.rl", "seed": 0, "inputs": inputs,
        "params": params.model_dump(mode="json"),
    }  # fmt: skip
    setting = rl.set_up(RunDir(folder, 0, config))
    # Neither side writes checkpoints here.
    setting.checkpoints.save = lambda *args, **kwargs: None  # type: ignore[method-assign,assignment]
    _, state = rl.begin(setting)
    generated: list[int] = []
    gather = rl.gather

    def counting(*args: Any) -> Any:
        found = gather(*args)
        generated.append(sum(map(tokens_of, found.trees)))
        return found

    rl.gather = counting

    def step(number: int) -> tuple[float, float, int]:
        began = time.perf_counter()
        rl.step_once(setting, state, number + 1)
        decoding.append(setting.clock.seconds["generate"])
        return time.perf_counter() - began, state["history"][-1]["loss"], generated[-1]

    return step


def _parts(annotation: Any) -> tuple[Any, ...]:
    from typing import get_args

    return get_args(annotation)


OURS = {"sft": our_sft, "reward": our_reward, "dpo": our_dpo, "grpo": our_rl, "rloo": our_rl}


# -- TRL -----------------------------------------------------------------------------------------------------


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


# -- a side's process ----------------------------------------------------------------------------------------


def peak_mb() -> float:
    """Peak resident memory of this process so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def serve(spec: dict[str, Any]) -> None:
    """One side: says that it is ready, then does a step a line of standard input."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes to the log

    def say(**values: Any) -> None:
        out.write(json.dumps(values) + "\n")
        out.flush()

    import torch

    from training.chat import load_tokenizer
    from training.engine import connect
    from training.rundir import seed_everything

    torch.set_num_threads(spec["threads"])
    seed_everything(0)
    tok = load_tokenizer(spec["model"])
    ready = False

    def turn() -> None:
        nonlocal ready
        if not ready:
            say(ready=True)
            ready = True
        if not sys.stdin.readline():
            raise SystemExit(0)

    def reply(seconds: float, loss: float, tokens: int) -> None:
        decode = decoding[-1] if decoding else None
        say(seconds=seconds, loss=loss, tokens=tokens, peak=peak_mb(), decode=decode)

    if spec["side"] == "trl":
        import trl  # noqa: F401

        run_trl(spec, tok, turn, reply)
    else:
        connect()
        step = OURS[spec["task"]](spec, tok)
        for number in range(spec["steps"]):
            turn()
            reply(*step(number))
    out.close()
    os._exit(0)


def tiny_model(folder: Path) -> str:
    """A random model with a token a byte."""
    from tests.training.tiny import byte_tokenizer, llama

    llama(0, max_position_embeddings=1024).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def prepare(spec: dict[str, Any]) -> None:
    """In a process of its own: the tiny model where none is given, its size, and the machine's two peaks."""
    import torch

    folder = Path(spec["model"])
    if not folder.exists():
        tiny_model(folder)
    from training.models import load_causal

    torch.set_num_threads(spec["threads"])
    model = load_causal(folder, torch.float32)
    inner = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "embed" not in name and "wte" not in name and "wpe" not in name and "lm_head" not in name
    )
    size = 1024
    peaks = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        if name not in spec["precisions"]:
            continue
        left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
        times = []
        for _ in range(6):
            began = time.perf_counter()
            left @ right
            times.append(time.perf_counter() - began)
        peaks[name] = 2 * size**3 / min(times)
    read = torch.randn(2**27)  # half a GB, which no cache holds
    times = []
    for _ in range(4):
        began = time.perf_counter()
        read.sum()
        times.append(time.perf_counter() - began)
    bandwidth = read.numel() * 4 / min(times)
    whole = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"weights": inner, "whole": whole, "peaks": peaks, "bandwidth": bandwidth}))


class Side:
    """One process and the pipes to it."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.log = Path(spec["folder"]) / f"{spec['side']}-{spec['task']}-{spec['precision']}.log"
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "infra.bench", "--serve", json.dumps(spec)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=environment(spec["side"]),
            )  # fmt: skip
        self.read()

    def read(self) -> dict[str, Any]:
        """The next thing that it says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            end = self.log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise RuntimeError(f"ended early ({self.process.wait()}):\n{end}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def step(self) -> dict[str, Any]:
        """Has it do one step."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.wait()


def environment(side: str = "") -> dict[str, str]:
    """CPU only, and no network; ours have the allocator's settings that the launcher gives its programs.
    Exported in the shell, they reach both sides."""
    return {
        **(ALLOCATOR if side == "ours" else {}),
        **os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1",
    }  # fmt: skip


# -- the comparison ------------------------------------------------------------------------------------------


def compare(spec: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of steps, ours and TRL's; which goes first alternates."""
    sides: dict[str, Side] = {}
    try:
        for name in ("ours", "trl"):
            sides[name] = Side({**spec, "side": name})
        pairs = []
        for number in range(spec["steps"]):
            order = ("ours", "trl") if number % 2 == 0 else ("trl", "ours")
            found = {name: sides[name].step() for name in order}
            pairs.append((found["ours"], found["trl"]))
        return pairs
    finally:
        for side in sides.values():
            side.close()


def row_of(
    task: str, precision: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]], size: dict[str, Any]
) -> dict[str, Any]:
    """The figures of one comparison."""
    counted = pairs[1:] or pairs
    row: dict[str, Any] = {"task": task, "precision": precision, "pairs": len(counted)}
    for place, name in enumerate(("ours", "trl")):
        steps = [pair[place] for pair in counted]
        rate = statistics.median(step["tokens"] / step["seconds"] for step in steps)
        row[f"{name}_seconds"] = statistics.median(step["seconds"] for step in steps)
        row[f"{name}_rate"] = rate
        row[f"{name}_peak"] = max(pair[place]["peak"] for pair in pairs)
        row[f"{name}_share"] = rate * PASSES[task] * size["weights"] / size["peaks"][precision]
        if task not in COMPARABLE:
            # Each new token of the longest sample reads all weights (float32) once.
            decode = statistics.median(step["decode"] for step in steps)
            row[f"{name}_bandwidth"] = NEW_TOKENS * size["whole"] * 4 / decode / size["bandwidth"]
        row[f"{name}_losses"] = [pair[place]["loss"] for pair in pairs]
    row["ratio"] = statistics.median(
        (ours["tokens"] / ours["seconds"]) / (other["tokens"] / other["seconds"]) for ours, other in counted
    )
    row["memory"] = row["ours_peak"] / row["trl_peak"]
    if task in COMPARABLE:
        row["loss_gap"] = max(abs(ours["loss"] - other["loss"]) for ours, other in pairs)
    return row


def show(rows: list[dict[str, Any]], title: str) -> None:
    """The table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, caption="ours / TRL; ratio: tokens a second, median of pairs of steps")
    for name in ("task", "s a step", "tokens/s", "ratio", "peak MB", "memory", "last loss", "loss gap",
                 "of matmul peak", "of bandwidth, decoding", "pairs"):  # fmt: skip
        table.add_column(name, justify="left" if name == "task" else "right")
    for row in rows:
        last = f"{row['ours_losses'][-1]:.4f} / {row['trl_losses'][-1]:.4f}"
        table.add_row(
            f"{row['task']} {row['precision']}",
            f"{row['ours_seconds']:.3f} / {row['trl_seconds']:.3f}",
            f"{row['ours_rate']:.0f} / {row['trl_rate']:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['ours_peak']:.0f} / {row['trl_peak']:.0f}",
            f"{row['memory']:.2f}",
            last if "loss_gap" in row else "-",
            f"{row['loss_gap']:.1e}" if "loss_gap" in row else "-",
            f"{row['ours_share']:.1%} / {row['trl_share']:.1%}",
            f"{row['ours_bandwidth']:.0%} / {row['trl_bandwidth']:.0%}" if "ours_bandwidth" in row else "-",
            str(row["pairs"]),
        )
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of a causal LM; without it a tiny random one")
    parser.add_argument("--data", default="../shared/data", help="folder with hh_rlhf/ and gsm8k/")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32"])
    parser.add_argument(
        "--steps", type=int, default=6, help="pairs of steps a comparison, the first a warm-up"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--backend", choices=("deepspeed", "torch"), default="deepspeed", help="our engine's")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--prepare", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Compares all that was asked for; returns 1 when a comparison could not be made."""
    args = options()
    if args.serve:
        serve(json.loads(args.serve))
        return 0
    if args.prepare:
        prepare(json.loads(args.prepare))
        return 0
    data = Path(args.data)
    real, asked = data / "hh_rlhf" / "harmless-base.jsonl", data / "gsm8k" / "train.jsonl"
    sample = Path("data/sample/preferences.jsonl")
    rows, failed = [], []
    with tempfile.TemporaryDirectory(prefix="plumbline-bench-") as folder:
        base = {
            "folder": folder, "model": args.model or f"{folder}/tiny", "threads": args.threads,
            "steps": args.steps, "backend": args.backend, "precisions": args.precision,
            "pairs": str(real if real.exists() else sample),
            "prompts": str(asked if asked.exists() else sample),
        }  # fmt: skip
        made = subprocess.run(
            [sys.executable, "-m", "infra.bench", "--prepare", json.dumps(base)],
            check=True, stdout=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        size = json.loads(made.stdout.splitlines()[-1])
        for precision in args.precision:
            for task in args.tasks:
                spec = {**base, "task": task, "precision": precision, "batch": BATCH[task]}
                try:
                    rows.append(row_of(task, precision, compare(spec), size))
                except RuntimeError as error:
                    failed.append(f"{task} {precision}: {error}")
    used = ", ".join(sorted({base["pairs"], base["prompts"]}))
    peaks = ", ".join(f"{name} {value / 1e9:.0f} GFLOP/s" for name, value in size["peaks"].items())
    machine = f"matmul peak {peaks}, read bandwidth {size['bandwidth'] / 1e9:.1f} GB/s"
    show(rows, f"{args.model or 'tiny random model'}, {args.threads} threads, {used}, {machine}")
    for message in failed:
        print(f"not compared: {message}", file=sys.stderr)
    if args.json:
        args.json.write_text(json.dumps({"size": size, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
