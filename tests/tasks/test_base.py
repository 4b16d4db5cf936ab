"""Any source becomes the same kind of folder: complete, in the saved precision, with one template and no
paths.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from data.errors import ConfigurationError
from tasks.base import gguf_file, is_hub_id, load, set_template
from tests.training.tiny import byte_tokenizer, llama
from training.chat import PLAIN_TEMPLATE
from training.models import digest, load_causal, merge_and_save


def test_a_package_is_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "weights_only"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "a.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert gguf_file("gguf:weights_only") == package / "a.gguf"
    assert "weights_only" not in sys.modules
    (package / "b.gguf").write_bytes(b"")
    assert gguf_file("gguf:weights_only/b.gguf") == package / "b.gguf"
    with pytest.raises(ConfigurationError, match=r"2 GGUF files match; name one of \['a.gguf', 'b.gguf'\]"):
        gguf_file("gguf:weights_only")
    with pytest.raises(ConfigurationError, match="not installed"):
        gguf_file("gguf:no_such_package_here")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("owner/name", True),
        ("gpt2", True),
        ("./folder", False),
        ("a/b/c", False),
        ("x.gguf", False),
        ("/a", False),
    ],
)
def test_what_may_be_a_hub_id(source: str, expected: bool) -> None:
    assert is_hub_id(source) == expected


def test_a_local_folder_is_saved_without_its_path(tmp_path: Path) -> None:
    source = tmp_path / "mine é"
    llama(max_position_embeddings=128).save_pretrained(source)
    byte_tokenizer(template=None, pad=None).save_pretrained(source)
    model, tok = load(tmp_path, "mine é", None)
    set_template(tmp_path, tok, None)
    assert tok.chat_template == PLAIN_TEMPLATE
    assert tok.pad_token == tok.eos_token
    for name in ("one", "two"):
        merge_and_save(model, tok, tmp_path / name, torch.bfloat16)
    assert digest(tmp_path / "one") == digest(tmp_path / "two")
    texts = [f.read_text(encoding="utf-8") for f in (tmp_path / "one").glob("*.json")]
    assert not any(str(tmp_path) in text for text in texts)
    saved = load_causal(tmp_path / "one", torch.bfloat16)
    assert torch.equal(saved.lm_head.weight, model.lm_head.weight.to(torch.bfloat16))


def test_a_template_is_text_or_a_file(tmp_path: Path) -> None:
    tok = byte_tokenizer()
    set_template(tmp_path, tok, "{{ messages }}")
    assert tok.chat_template == "{{ messages }}"
    (tmp_path / "mine.jinja").write_text("{{ 1 }}")
    set_template(tmp_path, tok, "mine.jinja")
    assert tok.chat_template == "{{ 1 }}"


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=r"model.source = 'empty': no causal language model"):
        load(tmp_path, "empty", None)
