"""Nothing that is printed or stored shows a credential.

Masked are the values of environment variables whose names speak of tokens, keys, secrets or passwords,
logins in URLs, and tokens of known form; in nested parameters also whatever stands under such a name.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable

from data.errors import ConfigurationError
from tasks.status import masked

_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_FIELD = re.compile(
    r"(^|[._-])(token|secret|password|passwd|credentials?|api_?key|access_?key|auth)$", re.IGNORECASE
)
_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_SHORT = 8  # a shorter value would mask ordinary words


def mask(text: str) -> str:
    """The text without credentials."""
    for name, value in os.environ.items():
        if len(value) >= _SHORT and _NAME.search(name) and value in text:
            text = text.replace(value, "***")
    return masked(_LOGIN.sub("***", text))


def mask_value(value: object) -> object:
    """Nested data without credentials."""
    if isinstance(value, dict):
        hidden = {key for key in value if isinstance(value[key], str) and _FIELD.search(str(key))}
        return {key: "***" if key in hidden else mask_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mask_value(item) for item in value]
    return mask(value) if isinstance(value, str) else value


def refuse_in_params(overrides: Iterable[str]) -> None:
    """params.yaml and dvc.lock are committed, so a credential must not get into them."""
    for override in overrides:
        key, _, value = override.partition("=")
        if mask(value) != value or (_FIELD.search(key) and value not in ("", "null")):
            raise ConfigurationError(
                f"{key}: the value holds a credential, and params.yaml is committed; leave it out "
                f"here and put it into "
                "an environment variable or a netrc file"
            )


class MaskingFilter(logging.Filter):
    """Masks each record before any handler sees it."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        clean = mask(text)
        if clean != text:
            record.msg, record.args = clean, ()
        return True
