"""The `data` section of params.yaml: which records, which rules, which bounds, how they are split."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Format = Literal[
    "auto",
    "preference",
    "hh",
    "sharegpt",
    "messages",
    "alpaca",
    "question_answer",
    "unpaired",
    "stepwise",
    "prompts",
    "tree",
    "label_studio",
]

Part = Literal["train", "judge", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "judge", "validation", "test")

Source = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


Sources = Annotated[tuple[Source, ...], Field(strict=False)]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class SplitParams(_Section):
    """Shares of the prompt groups that have pairs; they sum to 1. A share of 0 leaves the part out."""

    train: Share = 0.45
    """Pairs of the reward model (the proxy), prompts of the optimisation, chosen answers of SFT."""
    judge: Share = 0.30
    """Pairs of the held-out judge, never seen by policy or reward model."""
    validation: Share = 0.12
    """Pairs on which the reward model is tested."""
    test: Share = 0.13
    """Pairs on which the judge is tested."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        total = self.train + self.judge + self.validation + self.test
        if abs(total - 1.0) > 1e-6:
            raise ValueError(f"the shares sum to {total:g}, not 1; change one of them")
        if self.train == 0.0:
            raise ValueError("data.splits.train: 0 leaves nothing to train on; give it a share above 0")
        return self


class HubParams(_Section):
    """Which part of a Hugging Face data set is read; for entries of `files` that are no local path."""

    config: str | None = None
    """Name of the configuration (subset); None: the data set's default."""
    split: str = "train"
    """Split of the data set, on the hub or saved by `save_to_disk`."""
    revision: str | None = None
    """Commit or tag on the hub; name one to get the same rows next year."""


class DataParams(_Section):
    """All knobs of the validate stage."""

    files: Sources = Field(default=("data/sample/preferences.jsonl",), min_length=1)
    """Files, folders or hub ids (`owner/name`) with preferences, demonstrations, feedback or prompts."""
    format: Format = "auto"
    """Shape of the rows; `auto` decides for each row by its keys, a name refuses rows of any other shape."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Our name of a column to the file's name of it, e.g. {prompt: Question, answer: Best Answer}."""
    prompts: Sources = ()
    """Further sources whose prompts join the optimisation's prompts (answers in them are not used)."""
    eval_prompts: Sources = ()
    """Sources of the evaluation's prompts; empty: the prompts of the test part."""
    hub: HubParams = HubParams()
    """Which part of a Hugging Face data set."""
    min_pairs: int = Field(default=100, ge=0)
    """Pairs that must be kept, else the stage fails; 0 admits data without pairs."""
    max_quarantine_share: Share = 0.1
    """Share of faulty rows above which the stage fails (duplicates and skipped annotations are no faults)."""
    max_row_bytes: int = Field(default=4 * 1024 * 1024, ge=64)
    """Bytes of a row as it stands in the file; a longer one is refused without being held in memory."""
    max_chars: int = Field(default=100_000, ge=1)
    """Characters of a prompt and one answer together; a longer row is refused."""
    unknown_keys: Literal["keep", "reject"] = "keep"
    """What becomes of keys that no field holds: kept in the record's `extra`, or the row is refused."""
    system_role: Literal["keep", "fold", "reject"] = "keep"
    """System messages: kept, folded into the first user turn (for templates without them), or refused."""
    coerce: bool = False
    """Turn numbers, booleans and objects into text where text is due, instead of refusing the row."""
    min_annotator_agreement: Share | None = None
    """Mean share of judgements that agree, over pairs judged more than once; below it the stage fails."""
    group_by: Literal["opening", "prompt"] = "opening"
    """What keeps records in one split: the same first user turn, or the same whole prompt."""
    splits: SplitParams = SplitParams()
    """Shares of the parts."""
    min_part: int = Field(default=100, ge=1)
    """Pairs that each part gets even when its share gives fewer; at most an eighth of all pairs."""
    demonstrations_per_prompt: int = Field(default=1, ge=0)
    """Chosen answers a prompt that become demonstrations when the data has none, best first; 0: all."""

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.max_chars > self.max_row_bytes:
            raise ValueError(
                f"data.max_chars: {self.max_chars} can never be reached, a row has at most "
                f"{self.max_row_bytes} bytes; lower it or raise data.max_row_bytes"
            )
        return self
