"""Credentials are masked wherever text leaves the process."""

from __future__ import annotations

import logging

import pytest

from data.errors import ConfigurationError
from flows.secrets import MaskingFilter, mask, mask_value, refuse_in_params

SECRET = "s3cr3t-value-1234"


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_REGISTRY_TOKEN", SECRET)
    monkeypatch.setenv("SIGNING_KEY", "another-value-5678")
    monkeypatch.setenv("SHORT_KEY", "a")


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: {SECRET}",
        "x another-value-5678 y",
        "https://user:pass-word@host/x",
        "https://only-token@host/x",
    ],
)
def test_text(text: str) -> None:
    clean = mask(text)
    assert "***" in clean
    assert not any(part in clean for part in (SECRET, "another-value-5678", "pass-word", "only-token"))


def test_ordinary_text_is_left_alone() -> None:
    assert mask("a banana at https://host/a@b and user@host") == "a banana at https://host/a@b and user@host"


def test_nested_values() -> None:
    value = {
        "remote": {"url": "s3://u:p@h", "password": "x", "list": [{"api_key": "y"}, SECRET]},
        "max_tokens": 5,
    }
    clean = mask_value(value)
    assert clean == {
        "remote": {"url": "s3://***@h", "password": "***", "list": [{"api_key": "***"}, "***"]},
        "max_tokens": 5,
    }


@pytest.mark.parametrize("override", [f"model.source={SECRET}", "a.path=https://u:p@h/x", "hub.token=abc"])
def test_params_take_no_credential(override: str) -> None:
    with pytest.raises(ConfigurationError, match="holds a credential"):
        refuse_in_params([override])


def test_params_take_ordinary_values() -> None:
    refuse_in_params(["optimize.max_new_tokens=64", "sft.token_budget=2048", "model.source=owner/name"])


def test_log_records(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("plumbline.test")
    logger.addFilter(MaskingFilter())
    with caplog.at_level(logging.INFO):
        logger.info("token %s of %d", SECRET, 3)
    assert caplog.messages == ["token *** of 3"]
