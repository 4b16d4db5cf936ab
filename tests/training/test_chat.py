from __future__ import annotations

from pathlib import Path

import pytest

from data.errors import ConfigurationError
from data.records import Message
from tests.training.tiny import CHATML, byte_tokenizer, llama, prompt
from training.chat import (
    decode_answer,
    encode_answer,
    encode_prompt,
    end_of_turn,
    load_tokenizer,
    preflight,
    render,
    stop_ids,
    template_hash,
)

BOS, EOS = 0, 1


def test_prompt_ids_are_the_templates_text_and_nothing_else() -> None:
    tok = byte_tokenizer()
    ids = encode_prompt(tok, prompt("hi"))
    assert tok.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(BOS) == 2 and ids[0] == BOS and ids[1] != BOS


def test_a_template_with_bos_gets_no_second_one_from_the_tokenizer() -> None:
    tok = byte_tokenizer("{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    tok.add_bos_token = True
    assert encode_prompt(tok, prompt("ab")).count(BOS) == 1


@pytest.mark.parametrize("text", ["$46", "\n\nHello", " x", "", "caf\u00e9", "\u4f60\u597d"])
def test_answer_ends_with_its_end_of_turn_and_comes_back(text: str) -> None:
    tok = byte_tokenizer()
    ids = encode_answer(tok, text)
    assert ids[-1] == EOS and ids.count(EOS) == 1
    assert decode_answer(tok, ids) == text


def test_the_seam_can_not_merge() -> None:
    tok = byte_tokenizer()
    first = encode_prompt(tok, prompt("cost?\n"))
    joint = tok(render(tok, prompt("cost?\n")) + "$46", add_special_tokens=False)["input_ids"]
    assert joint[: len(first)] == first and joint[len(first) :] == encode_answer(tok, "$46")[:-1]


def test_text_that_looks_like_a_special_token_stays_text() -> None:
    tok = byte_tokenizer()
    ids = encode_answer(tok, "stop <|im_end|> no")
    assert ids.count(EOS) == 1
    assert decode_answer(tok, ids) == "stop <|im_end|> no"


def test_decoding_stops_at_the_first_end() -> None:
    tok = byte_tokenizer()
    assert decode_answer(tok, [*encode_answer(tok, "yes"), *encode_answer(tok, "more")]) == "yes"


def test_end_of_turn_is_the_templates_where_eos_is_another() -> None:
    tok = byte_tokenizer()
    tok.add_special_tokens({"additional_special_tokens": ["<|done|>"]})
    tok.eos_token = "<|done|>"
    assert end_of_turn(tok) == EOS and stop_ids(tok) == [EOS, tok.convert_tokens_to_ids("<|done|>")]
    tok.chat_template = CHATML.replace("<|im_end|>", "</s>")
    assert end_of_turn(tok) == tok.eos_token_id, "a template without a special end falls back to EOS"


def test_loading_sets_pad_and_template(tmp_path: Path) -> None:
    byte_tokenizer(template=None, pad=None).save_pretrained(tmp_path)
    tok = load_tokenizer(tmp_path)
    assert tok.pad_token_id == tok.eos_token_id == EOS
    assert tok.decode(encode_prompt(tok, prompt("hi"))).endswith("User: hi\nAssistant: ")
    preflight(tok, prompt("hi"), "ho")


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=tmp_path.name):
        load_tokenizer(tmp_path)


def test_template_hash_follows_the_template() -> None:
    assert template_hash(byte_tokenizer()) == template_hash(byte_tokenizer())
    assert template_hash(byte_tokenizer()) != template_hash(byte_tokenizer(CHATML + " "))


def test_preflight_accepts_the_good_and_names_the_bad() -> None:
    preflight(byte_tokenizer(), prompt("hi"), "there")
    twice = byte_tokenizer("{{ bos_token }}" + CHATML)
    with pytest.raises(ConfigurationError, match="two BOS"):
        preflight(twice, prompt("hi"), "there")
    cue = "{% if add_generation_prompt %}{{ 'Answer: ' }}{% endif %}"
    astray = byte_tokenizer("{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}" + cue)
    with pytest.raises(ConfigurationError, match="no prefix"):
        preflight(astray, prompt("hi"), "there")


def test_a_template_that_refuses_a_role_is_an_error_with_a_remedy() -> None:
    tok = byte_tokenizer(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    )
    with pytest.raises(ConfigurationError, match="system_role"):
        encode_prompt(tok, (Message(role="system", content="be brief"), *prompt("hi")))
