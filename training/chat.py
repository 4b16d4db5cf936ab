"""Conversations to token ids, the same way in every stage.

The prompt is the template's rendering, and what the template renders is all there is: the tokenizer adds no
BOS of its own (two BOS shift every score a little and raise no error). The answer is tokenised apart from
the prompt, so that the seam can't merge two tokens into one, and it ends with the token that ends a turn.
Padding is known by mask, never by id: pad may equal EOS.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data.errors import ConfigurationError
from data.records import Message

PLAIN_TEMPLATE = (
    "{{ bos_token or '' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n' }}"
    "{% else %}{{ 'Assistant: ' + message['content'] + eos_token + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
_ends: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[str, int]] = WeakKeyDictionary()


def load_tokenizer(path: Path | str) -> PreTrainedTokenizerBase:
    """Tokenizer of a local model folder, with an EOS, a pad token and a chat template (a plain one when it
    has none)."""
    try:
        tok = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: no tokenizer could be loaded ({error})") from error
    if tok.eos_token_id is None:
        raise ConfigurationError(
            f"{path}: the tokenizer has no EOS token, so no answer could end; set eos_token"
        )
    if tok.pad_token_id is None:
        tok.pad_token = tok.eos_token
    if not tok.chat_template:
        tok.chat_template = PLAIN_TEMPLATE
    return tok


def render(tok: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    """Text of a prompt: the template's, up to where the assistant speaks."""
    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        text = tok.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        roles = [message.role for message in messages]
        raise ConfigurationError(
            f"the chat template refuses the roles {roles} ({error}); set data.system_role: fold, or "
            f"another template"
        ) from error
    assert isinstance(text, str)
    return text


def encode_prompt(tok: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Ids of a prompt; no BOS beyond the template's."""
    return list(tok(render(tok, messages), add_special_tokens=False)["input_ids"])


def encode_answer(tok: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of an answer, its end of turn last. Text that looks like a special token stays text."""
    ids = tok(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return [*ids, end_of_turn(tok)]


def decode_answer(tok: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Text of an answer without its end of turn and other special tokens."""
    stops = set(stop_ids(tok))
    kept = next((list(ids[:at]) for at, token in enumerate(ids) if token in stops), list(ids))
    text = tok.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def end_of_turn(tok: PreTrainedTokenizerBase) -> int:
    """The special token that the template writes after an answer; EOS when it writes none."""
    template = str(tok.chat_template)
    known = _ends.get(tok)
    if known is None or known[0] != template:
        known = (template, _find_end(tok))
        _ends[tok] = known
    return known[1]


def _find_end(tok: PreTrainedTokenizerBase) -> int:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "zqz"}]
    try:
        text = tok.apply_chat_template(turns, tokenize=False)
    except TemplateError as error:
        raise ConfigurationError(
            f"the chat template can't render a user and an assistant turn: {error}"
        ) from error
    after = tok(str(text).rpartition("zqz")[2].lstrip(), add_special_tokens=False)["input_ids"]
    special = {*tok.all_special_ids, *_added(tok)}
    return int(after[0]) if after and after[0] in special else int(tok.eos_token_id)


def _added(tok: PreTrainedTokenizerBase) -> set[int]:
    return {index for index, token in tok.added_tokens_decoder.items() if token.special}


def stop_ids(tok: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end an answer: the end of turn, and EOS where that is another one."""
    return sorted({end_of_turn(tok), int(tok.eos_token_id)})


def template_hash(tok: PreTrainedTokenizerBase) -> str:
    """First 16 hexadecimal digits of the SHA-256 of the chat template; equal in all stages of a run."""
    return hashlib.sha256(str(tok.chat_template).encode()).hexdigest()[:16]


def preflight(tok: PreTrainedTokenizerBase, messages: Sequence[Message], answer: str) -> None:
    """Stops a run whose tokenisation would be wrong without an error: BOS, prefix, end of turn."""
    prompt = encode_prompt(tok, messages)
    ids = encode_answer(tok, answer)
    if not prompt:
        raise ConfigurationError("the chat template renders an empty prompt; set model.chat_template")
    bos = tok.bos_token_id
    if bos is not None and prompt[:2] == [bos, bos]:
        raise ConfigurationError(
            f"the prompt starts with two BOS tokens ({tok.bos_token!r}); take one out of the chat template"
        )
    turns = [{"role": message.role, "content": message.content} for message in messages]
    whole = tok.apply_chat_template([*turns, {"role": "assistant", "content": answer}], tokenize=False)
    if not str(whole).startswith(render(tok, messages)):
        raise ConfigurationError(
            "the rendered prompt is no prefix of the rendered conversation: what is trained would "
            "not be what is "
            "generated; set a model.chat_template whose generation prompt opens the assistant's turn"
        )
    if ids[-1] not in stop_ids(tok) or ids.count(ids[-1]) != 1:
        raise ConfigurationError(f"the answer must hold its end of turn once, at the end; its ids are {ids}")
    if decode_answer(tok, ids).strip() != answer.strip():
        raise ConfigurationError(f"the tokenizer does not give back an answer's text: {answer!r}")
