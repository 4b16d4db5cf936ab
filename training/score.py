"""Scores of answers by a learned model: loading, scoring, publishing.

A score model reads text, not ids: it has a tokenizer of its own, so any encoder or causal LM can judge any
policy. An encoder reads "prompt [SEP] answer" and the head sees the mean of its hidden states over the mask,
or what its pretrained pooler makes of the first one (as BERT's sequence classifiers do); a causal LM reads
the rendered conversation and the head sees the answer's last token, found by mask and never by id. Only the
prompt is cut, on its left, and the answer stays whole as long as it fits at all.

    score = w . h        h [d] in float32, w [heads, d], no bias: a shift of all scores means nothing
    w ~ N(0, 1 / (d + 1)) at the start

A process model (score.json names `process`) gives a score to each step of an answer: training/steps.py.

A folder holds score.json, the tokenizer, and for each ensemble member its backbone and head.safetensors.
"""

from __future__ import annotations

import inspect
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from data.errors import ConfigurationError, DivergenceError
from data.records import Message
from training.batches import Batch, Tree, cannot_share, collate, fill
from training.chat import encode_answer, encode_prompt, load_tokenizer
from training.config import Pooling, Precision, minilm_folder
from training.device import autocast, device
from training.logprobs import hidden_states
from training.models import is_lora, plain_copy, without_paths
from training.steps import StepBatch, score_steps

Kind = Literal["encoder", "causal"]
Rows = Sequence[tuple[Sequence[Message], str]]
CANARIES = (
    ("What is 12 × 7?", "84."),
    ("Name the price of two cafés in Zürich, in €.", "Naïvely: 3,50 € and 4 €.\n\nOr ask there."),
    ("hello", "Good morning! How can I help you today?"),
)
"""Texts whose scores are kept with a model: another tokenizer, template, cut or head gives others."""
SAME_STATE = 1e-5
"""Share of a state's size that rounding may move it by."""
CANARY_BOUND = 1e-3
"""Largest difference of a canary's score in float32; other kernels differ by about 1e-5."""


@dataclass(frozen=True)
class Padded:
    """Whole rows, padded on either side; `mask` is True on tokens."""

    ids: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    types: Int[Tensor, "B T"]

    def to(self, where: torch.device) -> Padded:
        """The same rows on a device."""
        return Padded(self.ids.to(where), self.mask.to(where), self.types.to(where))


class Member(nn.Module):
    """One backbone with its head; forward gives the score of each answer, [N, heads] in float32."""

    def __init__(self, backbone: Any, kind: Kind, heads: int, seed: int, pooling: Pooling = "all") -> None:
        """`pooling`: of which tokens an encoder's states are averaged, or `pooler`: its own; a causal LM's
        last one is read."""
        super().__init__()
        self.backbone = backbone
        self.kind = kind
        self.pooling = pooling
        width = backbone.config.get_text_config().hidden_size
        generator = torch.Generator().manual_seed(seed)
        self.head = nn.Parameter(torch.randn(heads, width, generator=generator) / math.sqrt(width + 1))

    def forward(self, batch: Batch | Padded | StepBatch) -> Float[Tensor, "*N heads"]:
        """Scores of a batch's answers (prompts shared), of whole rows, or of each step [N, S, heads]."""
        inner: Any = self.backbone.get_base_model() if is_lora(self.backbone) else self.backbone
        if isinstance(batch, StepBatch):
            pooled = hidden_states(inner, batch.batch)[batch.at]
        elif isinstance(batch, Batch):
            pooled = hidden_states(inner, batch)[batch.last]
        elif self.kind == "causal":
            positions = (batch.mask.long().cumsum(1) - 1).clamp(min=0)
            named = accepted(inner, position_ids=positions, use_cache=False)
            hidden = inner(input_ids=batch.ids, attention_mask=batch.mask.long(), **named).last_hidden_state
            pooled = hidden[torch.arange(len(hidden)), last_token(batch.mask)]
        else:
            # RoBERTa has one token type, DistilBERT none: there the separator alone tells the answer.
            typed = getattr(inner.config, "type_vocab_size", 0) > 1
            named = accepted(inner, token_type_ids=batch.types) if typed else {}
            out = inner(input_ids=batch.ids, attention_mask=batch.mask.long(), **named)
            pooled = out.pooler_output if self.pooling == "pooler" else averaged(out, batch, self.pooling)
        with torch.autocast(device().type, enabled=False):
            scores: Tensor = pooled.float() @ self.head.T
        return scores


def averaged(out: Any, batch: Padded, pooling: Pooling) -> Float[Tensor, "B d"]:
    """Mean of an encoder's last states in float32, over all tokens or the answer's."""
    weight = (batch.types if pooling == "answer" else batch.mask)[..., None].float()
    total: Tensor = (out.last_hidden_state.float() * weight).sum(1)
    return total / weight.sum(1)


def last_token(mask: Bool[Tensor, "B T"]) -> Int[Tensor, " B"]:
    """Index of the last True of each row, wherever the padding is."""
    return (mask.long() * torch.arange(mask.shape[1], device=mask.device)).argmax(1)


def accepted(module: nn.Module, **named: Any) -> dict[str, Any]:
    """Those of some arguments that a module's forward pass has a name for."""
    known = inspect.signature(module.forward).parameters
    return {name: value for name, value in named.items() if name in known}


def load_backbone(path: Path | str, pooling: Pooling = "all") -> tuple[Any, Kind]:
    """Backbone without any head, in float32, and how it is read; a missing weight is an error, and a missing
    pooler where `pooling` asks for it.

    A checkpoint's own score head (...ForSequenceClassification) is left behind: ours is trained on the pairs.
    """
    model = _trunk(path, pooling)
    if not looks_back_only(model):
        return model, "encoder"
    model.config.use_cache = False
    return model, "causal"


@torch.no_grad()
def looks_back_only(model: Any) -> bool:
    """Whether the first token's state stays as it is when all that follows is another text.

    Asked of the model itself: a name does not tell. Qwen2ForSequenceClassification is as causal as
    Qwen2ForCausalLM, and an embedding model may read the very same layers in both directions.
    """
    first = torch.arange(5, 13)
    second = torch.cat([first[:1], first[1:] + 8])
    ids = torch.stack([first, second]) % model.config.get_text_config().vocab_size
    # Some caches of recurrent layers fail in a trunk that has no attention.
    named = accepted(model, use_cache=False)
    out = model(input_ids=ids, attention_mask=torch.ones_like(ids), **named)
    states = out.last_hidden_state[:, 0].float()
    return bool((states[0] - states[1]).abs().max() <= SAME_STATE * states.abs().max())


def _trunk(path: Path | str, pooling: Pooling) -> Any:
    disable_progress_bar()
    set_verbosity_error()  # Missing weights are an error here, not a table on the screen.
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
        if config.is_encoder_decoder:
            raise ConfigurationError(
                f"{path}: {config.model_type} has an encoder and a decoder, a score model is one of them; "
                "name an encoder (BERT, RoBERTa, DeBERTa) or a causal LM"
            )
        model, info = AutoModel.from_pretrained(
            str(path), dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: no reward backbone could be loaded ({error})") from error
    missing = sorted(info["missing_keys"])
    if rest := [key for key in missing if not key.startswith("pooler.")]:
        raise ConfigurationError(f"{path}: weights are missing: {rest[:5]}")
    if pooling != "pooler":
        if hasattr(model, "pooler"):
            model.pooler = None
    elif missing or getattr(model, "pooler", None) is None:
        raise ConfigurationError(
            f"{path}: pooling is pooler, but this {config.model_type} comes without a pretrained one; set "
            "pooling: all or answer (mean of states; a causal LM's last one is read)"
        )
    return model


def locate(model: str, policy: Path | None) -> Path | str:
    """Folder behind a `reward.model`: minilm (the installed package), policy, a folder, or a hub id as it
    is."""
    if model == "policy":
        if policy is None:
            raise ConfigurationError("model: policy needs inputs.model, the folder of the stage's causal LM")
        return policy
    if model != "minilm":
        return model
    return minilm_folder()


def load_score_tokenizer(path: Path | str, kind: Kind) -> PreTrainedTokenizerBase:
    """The score model's own tokenizer."""
    if kind == "causal":
        return load_tokenizer(path)
    tok = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    if None in (tok.cls_token_id, tok.sep_token_id, tok.pad_token_id):
        raise ConfigurationError(f"{path}: an encoder's tokenizer needs CLS, SEP and PAD tokens")
    return tok


def encode_row(
    tok: PreTrainedTokenizerBase, kind: Kind, messages: Sequence[Message], answer: str, max_length: int
) -> tuple[list[int], list[int]]:
    """Ids of prompt and answer, at most max_length together; the prompt loses its left part first."""
    if kind == "causal":
        prompt, ids, opening = encode_prompt(tok, messages), encode_answer(tok, answer), 0
    else:
        turns = "\n".join(f"{message.role}: {message.content}" for message in messages)
        text = messages[0].content if len(messages) == 1 else turns
        prompt = [tok.cls_token_id, *tok(text, add_special_tokens=False)["input_ids"], tok.sep_token_id]
        ids, opening = [*tok(answer, add_special_tokens=False)["input_ids"], tok.sep_token_id], 1
    # The prompt keeps its opening and its last token: an encoder's CLS and SEP, a template's cue to speak.
    room = max(max_length - opening - 1, 1)
    if len(ids) > room:
        ids = [*ids[: room - 1], ids[-1]]
    keep = max_length - len(ids) - opening
    return (prompt if len(prompt) <= keep + opening else prompt[:opening] + prompt[-keep:]), ids


def pad(rows: Sequence[tuple[list[int], list[int]]], pad_id: int, left: bool = False) -> Padded:
    """Prompt and answer ids as whole rows; token type 1 marks the answer."""
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), width), pad_id)
    mask, types = (
        torch.zeros(len(rows), width, dtype=torch.bool),
        torch.zeros(len(rows), width, dtype=torch.long),
    )
    for row, (prompt, answer) in enumerate(rows):
        length = len(prompt) + len(answer)
        start = width - length if left else 0
        ids[row, start : start + length] = torch.tensor(prompt + answer)
        mask[row, start : start + length] = True
        types[row, start + len(prompt) : start + length] = 1
    return Padded(ids, mask, types)


class ScoreModel:
    """A published reward model or judge, ready to score text."""

    def __init__(
        self,
        members: Sequence[Member],
        tok: PreTrainedTokenizerBase,
        settings: dict[str, Any],
        precision: Precision,
    ) -> None:
        self.members = [member.to(device()).eval() for member in members]
        self.tok = tok
        self.kind: Kind = settings["kind"]
        self.heads: tuple[str, ...] = tuple(settings["heads"])
        self.max_length = int(settings["max_length"])
        self.process: dict[str, Any] = settings.get("process") or {}
        """`split` and `reduce` of a process model, else empty."""
        self.settings = settings
        self.precision: Precision = precision
        self.shared = self.kind == "causal" and cannot_share(members[0].backbone) is None

    @classmethod
    def load(cls, folder: Path, precision: Precision = "fp32") -> Self:
        """Reads a folder that `save` wrote; every weight, the heads' too, must be there."""
        try:
            settings = json.loads((folder / "score.json").read_text(encoding="utf-8"))
            members = []
            heads, pooling = max(1, len(settings["heads"])), settings.get("pooling", "all")
            for number in range(settings["members"]):
                backbone = _trunk(folder / f"member-{number}", pooling)
                if settings["kind"] == "causal":
                    backbone.config.use_cache = False
                member = Member(backbone, settings["kind"], heads, 0, pooling)
                head = load_file(folder / f"member-{number}" / "head.safetensors")["head"]
                with torch.no_grad():
                    member.head.copy_(head)
                members.append(member)
        except (OSError, KeyError, json.JSONDecodeError) as error:
            raise ConfigurationError(
                f"{folder}: no complete score model ({error}); run the reward stage again"
            ) from error
        model = cls(members, load_score_tokenizer(folder, settings["kind"]), settings, precision)
        model._compare(folder)
        return model

    def seal(self, folder: Path) -> None:
        """Keeps the canaries' scores with the published model, so that each `load` can compare."""
        self.settings["canaries"] = [round(score, 6) for score in self._canaries()]
        self._write_settings(folder)

    def _canaries(self) -> list[float]:
        rows = [([Message(role="user", content=asked)], said) for asked, said in CANARIES]
        kept, self.precision = self.precision, "fp32"
        try:
            if self.process:
                scores, _ = score_steps(self, [(prompt, [said]) for prompt, said in rows])
            else:
                scores = self.score_members(rows)
        finally:
            self.precision = kept
        return [float(score) for score in scores.mean(0).flatten()]

    def _compare(self, folder: Path) -> None:
        """Raises when this is not the model, or not the tokenizer, that was published."""
        wanted = self.settings.get("canaries")
        if wanted is None:
            return
        found = self._canaries()
        gap = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
        if not gap <= CANARY_BOUND:
            raise ConfigurationError(
                f"{folder}: known answers score {found[0]:.4g} and not {wanted[0]:.4g} as when it was "
                f"published (largest difference {gap:.3g}, bound {CANARY_BOUND:g}): its tokenizer, chat "
                "template or weights are others; run its stage again"
            )

    def save(
        self,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        states: Sequence[Mapping[str, Tensor] | None] | None = None,
    ) -> None:
        """Publishes it: complete or absent. `states`: each member's tensors where its own are sharded
        (ZeRO-3)."""
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for number, member in enumerate(self.members):
            part = unfinished / f"member-{number}"
            state = states[number] if states else None
            backbone = None if state is None else {
                name.removeprefix("backbone."): tensor for name, tensor in state.items() if name != "head"
            }  # fmt: skip
            plain_copy(member.backbone, dtype, backbone).save_pretrained(part)
            head = (
                (member.head if state is None else state["head"])
                .detach()
                .to("cpu", torch.float32)
                .contiguous()
            )
            if not bool(head.isfinite().all()):
                raise DivergenceError(f"the head of member {number} is not finite; nothing was published")
            save_file({"head": head}, part / "head.safetensors")
            without_paths(part)
        self.tok.save_pretrained(unfinished)
        without_paths(unfinished)
        self._write_settings(unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)

    def _write_settings(self, folder: Path) -> None:
        text = json.dumps(self.settings, indent=1, sort_keys=True)
        (folder / "score.json").write_text(text + "\n", encoding="utf-8")

    def score(self, rows: Rows, token_budget: int = 8192) -> Float[Tensor, "*shape"]:
        """Mean over the members: [N] with one head, [N, heads] with several; on the CPU, in order of the
        rows."""
        scores = self.score_members(rows, token_budget).mean(0)
        return scores if self.heads else scores[:, 0]

    def score_members(self, rows: Rows, token_budget: int = 8192) -> Float[Tensor, "M N heads"]:
        """Scores of each member: an ensemble's spread is what mean - lambda * variance needs."""
        if self.process:
            raise ConfigurationError(
                "a process reward model scores steps, not whole answers; name a model that was trained on "
                "pairs (reward.process: null)"
            )
        encoded = [
            encode_row(self.tok, self.kind, messages, text, self.max_length) for messages, text in rows
        ]
        scores = torch.zeros(len(self.members), len(rows), max(1, len(self.heads)))
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, (prompt, _) in enumerate(encoded):
            groups.setdefault(tuple(prompt) if self.shared else (index,), []).append(index)
        items = list(groups.values())
        lengths = [self._lengths([encoded[index] for index in item]) for item in items]
        with torch.no_grad():
            for part in fill(lengths, token_budget, padded=not self.shared):
                order = [index for item in part for index in items[item]]
                batch = self._batch([[encoded[index] for index in items[item]] for item in part]).to(device())
                for number, member in enumerate(self.members):
                    with autocast(self.precision):
                        scores[number, order] = member(batch).cpu()
        return scores

    def _lengths(self, group: Sequence[tuple[list[int], list[int]]]) -> list[int]:
        if self.shared:
            return [len(group[0][0]) + sum(len(answer) for _, answer in group)]
        return [len(prompt) + len(answer) for prompt, answer in group]

    def _batch(self, groups: Sequence[Sequence[tuple[list[int], list[int]]]]) -> Batch | Padded:
        return batch_of(groups, int(self.tok.pad_token_id), self.shared)


def batch_of(
    groups: Sequence[Sequence[tuple[list[int], list[int]]]], pad_id: int, shared: bool
) -> Batch | Padded:
    """Tensors of groups of (prompt, answer); with `shared` each group has one prompt, computed once."""
    if shared:
        trees = [Tree("", group[0][0], [answer for _, answer in group]) for group in groups]
        return collate(trees, pad_id, shared=True)
    return pad([row for group in groups for row in group], pad_id)
