"""Tiny random models and run folders for tests: nothing is downloaded, all of it takes milliseconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from data.records import Demonstration, Message, Preference, digest, to_line
from training.rundir import RunDir, seed_everything

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(template: str | None = CHATML, pad: str | None = "<|im_end|>") -> PreTrainedTokenizerFast:
    """A token a byte, and two special tokens; pad equals EOS unless told otherwise."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(["<|im_start|>", "<|im_end|>", *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tok = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token=pad
    )
    tok.chat_template = template
    return tok


def llama(seed: int = 0, vocab: int = 258, tied: bool = True, **changes: Any) -> LlamaForCausalLM:
    """Two layers, 32 wide."""
    torch.manual_seed(seed)
    values: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    return LlamaForCausalLM(LlamaConfig(**{**values, **changes}))


def gpt2(seed: int = 0, vocab: int = 258) -> GPT2LMHeadModel:
    """Two layers, 32 wide; float64 weights give float64 throughout (Llama norms in float32)."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocab, n_positions=256, n_embd=32, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def save_policy(folder: Path, seed: int = 0) -> Path:
    """A causal LM with its tokenizer, as a stage publishes it."""
    llama(seed).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def save_encoder(folder: Path, seed: int = 0) -> Path:
    """A BERT-like encoder with its tokenizer."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=261, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, pad_token_id=258,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["[unused0]", "[unused1]", *letters, "[PAD]", "[CLS]", "[SEP]"]
    backend = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tok = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )
    tok.save_pretrained(folder)
    return folder


def prompt(text: str) -> tuple[Message, ...]:
    """A conversation of one turn."""
    return (Message(role="user", content=text),)


def write_demonstrations(path: Path, count: int = 12) -> Path:
    """Short rows of unequal length."""
    rows = [
        Demonstration(
            prompt=prompt(f"say {index}"),
            id=digest(str(index)),
            group=str(index),
            answer="ab" * (1 + index % 5),
        )
        for index in range(count)
    ]
    path.write_text("".join(map(to_line, rows)), encoding="utf-8")
    return path


def write_pairs(path: Path, count: int = 16, dimension: str | None = None) -> Path:
    """The chosen answer says yes, the rejected one no; lengths tell nothing."""
    rows = [
        Preference(
            prompt=prompt(f"is it {index}?"),
            id=digest(str(index)),
            group=str(index),
            chosen="yes" + "." * (index % 4),
            rejected="no!" + "." * ((index + 2) % 4),
            dimension=dimension or ("quality", "safety")[index % 2],
        )
        for index in range(count)
    ]
    path.write_text("".join(map(to_line, rows)), encoding="utf-8")
    return path


def workdir(path: Path, program: str, params: dict[str, Any], inputs: dict[str, Path], seed: int = 0) -> Path:
    """A run folder with its config.json."""
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "stage": program,
        "program": f"training.{program}",
        "params": params,
        "seed": seed,
        "dtype": "float32",
        "inputs": {name: str(value) for name, value in inputs.items()},
    }
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def run_program(main: Callable[[RunDir], None], path: Path, stop_at: int | None = None) -> dict[str, Any]:
    """A training program in this process, and its result; `stop_at`: a stop signal during that step."""
    opened = RunDir.open(path, 0)
    seed_everything(opened.seed)
    if stop_at is not None:
        metrics = opened.metrics

        def hooked(step: int, values: Any) -> None:
            metrics(step, values)
            opened.stop_requested = step >= stop_at - 1  # seen by the next step

        opened.metrics = hooked  # type: ignore[method-assign]
    main(opened)
    result: dict[str, Any] = json.loads((path / "result.json").read_text())
    return result
