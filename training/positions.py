"""How many positions a model has, against the lengths that the parameters allow.

Behind its last learned position a model ends with an index error, in the middle of a run. A rotary one goes
on, and answers worse and worse without a word. Both are refused before anything is trained: who wants a
rotary model to read further says so in its config.json (rope_scaling), where it counts here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from data.errors import ConfigurationError
from training.config import EvaluateParams, RewardParams, SftParams
from training.config_optimize import ON_PAIRS, OptimizeParams

Limited = SftParams | RewardParams | OptimizeParams | EvaluateParams
_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")
_BEHIND_PADDING = frozenset(
    {
        "camembert", "data2vec-text", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm",
        "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
    }
)  # fmt: skip
"""Model types whose first token has position pad_token_id + 1: of RoBERTa's 514, 512 can be used."""


def positions(config: Mapping[str, Any]) -> int | None:
    """Tokens that a model can read, from its config.json as a dict; None where there is no limit, or where
    it does not say."""
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and (found := positions(inner)) is not None:
        return found
    count = next((config[name] for name in _NAMES if _whole(config.get(name))), None)
    if count is None or _unlimited(config):
        return None
    if config.get("model_type") in _BEHIND_PADDING:
        padding = config.get("pad_token_id", 1)
        return int(count) - (padding if _whole(padding) or padding == 0 else 1) - 1
    return max(int(count), _stretched(config, int(count)))


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _unlimited(config: Mapping[str, Any]) -> bool:
    """Distances instead of positions: Falcon's alibi, DeBERTa without absolute positions."""
    return config.get("alibi") is True or config.get("position_biased_input") is False


def _stretched(config: Mapping[str, Any], count: int) -> int:
    """Positions with rotary scaling: factor times what was trained, of the layers that reach least far.

    What was trained is `original_max_position_embeddings`; where that is not named, the number that the
    configuration gives, as transformers takes it for linear, dynamic and yarn.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = [part for part in scaling.values() if isinstance(part, Mapping)] or [scaling]
    reach = []
    for kind in kinds:
        factor, original = kind.get("factor"), kind.get("original_max_position_embeddings")
        trained = original if _whole(original) else count
        reach.append(int(factor * trained) if isinstance(factor, int | float) else count)
    return min(reach)


def lengths(section: Limited) -> dict[str, int]:
    """Tokens that a stage may put through its model at once: the keys that allow them, and how many."""
    if isinstance(section, OptimizeParams) and section.algorithm in ON_PAIRS:
        return {"preference.max_length": section.preference.max_length}
    if isinstance(section, OptimizeParams | EvaluateParams):
        return {"max_prompt + max_new_tokens": section.max_prompt + section.max_new_tokens}
    return {"max_length": section.max_length}


def over(config: Mapping[str, Any], section: Limited) -> str | None:
    """What of a section goes beyond a model's positions, as text; None where all fits."""
    limit = positions(config)
    for keys, tokens in lengths(section).items():
        if limit is not None and tokens > limit:
            return f"{keys} = {tokens} tokens, the model has {limit} positions"
    return None


REMEDY = "lower it, or take a model with more (a rotary one is stretched by rope_scaling in its config.json)"


def require(config: Mapping[str, Any], section: Limited, stage: str, where: str) -> None:
    """Raises ConfigurationError where the stage's lengths go beyond the positions of the model at `where`."""
    found = over(config, section)
    if found is not None:
        raise ConfigurationError(f"{stage}: {found} ({where}); {REMEDY}")


def require_at(source: Path | str, section: Limited, stage: str) -> None:
    """`require`, of a model that is not loaded yet."""
    from transformers import AutoConfig  # seconds, which who only compares numbers need not wait

    try:
        config = AutoConfig.from_pretrained(str(source), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{source}: no model configuration could be read ({error})") from error
    require(config.to_dict(), section, stage, str(source))
