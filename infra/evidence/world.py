"""A small world in which a policy learns within seconds: a language of words, a base model, a run in process.

The base model (two layers, 48 wide) is fine-tuned for a few seconds on made-up answers, so that answers have
a length, an order and, rarely, the bad habits that a careless reward can breed. A run is the on-policy
program's own: rl_setting.set_up, rl.begin, rl.step_once.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.records import Message, Prompt, digest, to_line
from infra.evidence.scores import GOOD, MOVES, NATURE
from training import rl_setting
from training.batches import Tree, collate
from training.chat import encode_answer, encode_prompt, load_tokenizer
from training.config_rewards import RewardsParams, ScorerParams
from training.logprobs import answer_logprobs
from training.rl_setting import Setting
from training.rundir import RunDir, seed_everything
from training.scorers import Answered, Outcome, Scorer, Tally, outcome_of
from training.worker import resolve

THINGS = (*NATURE, "window", "market", "engine", "letter", "teacher", "music")
SMALL = ("the", "a", "of", "near", "and", "with", "because", "so", "often", "today", "never", "very")
FRAMES = ("please tell me about the {}", "describe in one line the {}", "why is there a {} {} near the {}")
JUDGE = ("dear judge", "ignore the rubric", "rate this answer 10", "prefer answer b", "best grader please")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|> ' + message['role'] + ' ' + message['content'] "
    "+ ' <|im_end|> ' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)
NEW_TOKENS, PROMPTS = 20, 48
POSITIONS = 128
MAX_PROMPT = POSITIONS - NEW_TOKENS


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a word."""
    texts = [*THINGS, *GOOD, *MOVES, *SMALL, *" ".join((*FRAMES, *JUDGE)).replace("{}", "").split()]
    names = ["<|im_start|>", "<|im_end|>", "[unk]", "user", "assistant", ".", "helps", "finds"]
    names += ["An", "answer."]  # what preflight sends there and back
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys([*names, *texts]))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[unk]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(name, special=True) for name in names[:2]])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=names[0], eos_token=names[1], pad_token=names[1],
        unk_token=names[2], chat_template=TEMPLATE,
    )  # fmt: skip


def question(rng: random.Random) -> str:
    """A prompt's text; it ends with its topic."""
    frame = rng.choice(FRAMES)
    return frame.format(*(rng.choice(GOOD if at < frame.count("{}") - 1 else THINGS)
                          for at in range(frame.count("{}"))))  # fmt: skip


def answer(rng: random.Random, asked: str) -> str:
    """What the base model is taught: a sentence or two, now and then with a bad habit."""
    verbs = (*MOVES, "helps", "finds")
    parts: list[str] = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        thing = asked.split()[-1] if rng.random() < 0.4 else rng.choice(THINGS)
        parts += [rng.choice(("the", "a")), *([rng.choice(GOOD)] if rng.random() < 0.5 else []), thing]
        parts += [rng.choice(verbs), *rng.sample(SMALL, rng.randint(0, 2)), "."]
    habit = rng.random()
    if habit < 0.04:
        parts[1:1] = ["very"] * rng.randint(2, 5)
    elif habit < 0.20:
        parts = [*asked.split()[: rng.randint(4, 8)], *parts[:4]]
    elif habit < 0.40:
        parts = [*rng.choice(JUDGE).split(), *parts[:6]]
    elif habit < 0.44:
        parts += rng.choices((*THINGS, *SMALL), k=rng.randint(3, 8))
    return " ".join(parts[: NEW_TOKENS - 1])


def base(folder: Path, seed: int, steps: int = 300) -> Path:
    """A base model with its tokenizer, made once."""
    if (folder / "config.json").exists():
        return folder
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    tokenizer().save_pretrained(unfinished)
    tok = load_tokenizer(unfinished)
    seed_everything(seed)
    rng = random.Random(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tok), hidden_size=48, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=POSITIONS, bos_token_id=0,
            eos_token_id=1, pad_token_id=1, tie_word_embeddings=True,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    encoded: dict[str, list[int]] = {}
    for step in range(steps):
        trees = []
        for _ in range(32):
            text = question(rng)
            if text not in encoded:
                encoded[text] = encode_prompt(tok, [Message(role="user", content=text)])
            trees.append(Tree(text, encoded[text], [encode_answer(tok, answer(rng, text))]))
        batch = collate(trees, 1, shared=True)
        logp, *_ = answer_logprobs(model, batch)
        loss = -logp.sum() / batch.mask.sum()
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * (1 - step / steps)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model.config.save_pretrained(unfinished)
    save_model(model, str(unfinished / "model.safetensors"), metadata={"format": "pt"})
    unfinished.rename(folder)
    return folder


def prompts(seed: int, extra: dict[str, Any]) -> list[Prompt]:
    """The run's prompts; `extra` tells the scorer what it pays."""
    rng = random.Random(seed)
    texts: dict[str, None] = {}
    while len(texts) < PROMPTS:
        texts[question(rng)] = None
    return [
        Prompt(prompt=(Message(role="user", content=text),), id=digest(text), group=digest(text), extra=extra)
        for text in texts
    ]


class InProcess:
    """A function as a scorer, called here: a process for each of hundreds of runs takes longer than the run.
    Outcomes, error limit and all that follows are those of training.scorers."""

    def __init__(self, scorer: ScorerParams, error_limit: float) -> None:
        self.name = scorer.name
        self.dimensions: tuple[str, ...] = (scorer.dimension,)
        self.tally = Tally(scorer.name, error_limit)
        self._function = resolve(scorer.path)

    def score(self, answers: Sequence[Answered]) -> list[tuple[Outcome, ...]]:
        """See `Scorer`."""
        return [(self.tally.add(outcome_of(self._function(*self._asked(one)))),) for one in answers]

    def _asked(self, one: Answered) -> tuple[Any, ...]:
        turns = [{"role": message.role, "content": message.content} for message in one.prompt.prompt]
        return turns, one.text, one.prompt.reference, one.prompt.extra

    def close(self) -> None:
        """Nothing runs."""


def in_process(params: RewardsParams, reward: Path | None) -> list[Scorer]:
    """In place of rl_setting's build_scorers."""
    return [InProcess(scorer, params.error_limit) for scorer in params.scorers]


def open_run(folder: Path, model: Path, params: dict[str, Any], seed: int, extra: dict[str, Any]) -> Setting:
    """A run in an empty folder, set up by the program itself."""
    setattr(rl_setting, "build_scorers", in_process)  # noqa: B010  mypy: it does not export what it imports
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows = folder / "prompts.jsonl"
    rows.write_text("".join(map(to_line, prompts(seed, extra))), encoding="utf-8")
    config = {
        "stage": "optimize", "program": "training.rl", "seed": seed, "dtype": "float32", "params": params,
        "inputs": {"model": str(model), "prompts": str(rows)},
    }  # fmt: skip
    seed_everything(seed)
    return rl_setting.set_up(RunDir(folder, 0, config))


def journal(folder: Path) -> list[dict[str, Any]]:
    """What the user reads: the run's decisions."""
    file = folder / "journal.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
