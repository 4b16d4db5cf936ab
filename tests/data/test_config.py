"""The data section refuses what can not work, and says which key, value and bound."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from data.config import DataParams


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"file": ["a"]}, "Extra inputs"),
        ({"files": []}, "at least 1"),
        ({"format": "xml"}, "label_studio"),
        ({"min_pairs": -1}, "greater than or equal to 0"),
        ({"max_quarantine_share": 1.5}, "less than or equal to 1"),
        ({"splits": {"train": 0.5}}, "the shares sum to 1.05"),
        ({"splits": {"train": 0, "judge": 0.4, "validation": 0.3, "test": 0.3}}, "nothing to train on"),
        ({"max_row_bytes": 1000, "max_chars": 2000}, "can never be reached"),
        *(({key: "8"}, "valid integer") for key in ("min_pairs", "min_part", "max_chars")),
        *(({key: True}, "valid integer") for key in ("min_pairs", "demonstrations_per_prompt")),
        ({"max_quarantine_share": True}, "valid number"),
        ({"max_quarantine_share": float("nan")}, "finite number"),
        ({"splits": {"train": "0.45"}}, "valid number"),
        ({"coerce": 0}, "valid boolean"),
        ({"files": [3]}, "valid string"),
        ({"hub": {"branch": "main"}}, "Extra inputs"),
    ],
)
def test_impossible_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataParams.model_validate(values)


def test_every_field_is_documented() -> None:
    for section in (DataParams, *(type(getattr(DataParams(), name)) for name in ("splits", "hub"))):
        undocumented = [name for name, field in section.model_fields.items() if not field.description]
        assert undocumented == []
