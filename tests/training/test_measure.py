from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from tests.training.test_experience import Fixed, row, scoring
from tests.training.tiny import byte_tokenizer
from training.experience import Experience, gather
from training.generate import Rollout
from training.measure import copied_tokens, measure, repeated_tokens, shared_phrase


def test_repeated_tokens_by_hand() -> None:
    # 1 1 1 1 1 1: three 4-grams, one distinct. 1 2 1 2 1 2 1: four, two distinct.
    assert repeated_tokens([1] * 6) == pytest.approx(2 / 3)
    assert repeated_tokens([1, 2, 1, 2, 1, 2, 1]) == pytest.approx(0.5)
    assert repeated_tokens([1, 2, 3, 4, 5]) == 0.0
    assert repeated_tokens([1, 1, 1]) == 0.0, "too short for a 4-gram"


def test_copied_tokens_by_hand() -> None:
    prompt = [9, 1, 2, 3, 4, 5, 6]
    # 4-grams of the answer: 1234 and 2345 stand in the prompt, 3457 and 4577 do not: five tokens of seven.
    assert copied_tokens(prompt, [1, 2, 3, 4, 5, 7, 7]) == pytest.approx(5 / 7)
    assert copied_tokens(prompt, [9, 1, 2, 3, 0, 3, 4, 5, 6, 0]) == pytest.approx(8 / 10)
    assert copied_tokens(prompt, [6, 5, 4, 3, 2, 1]) == 0.0
    assert copied_tokens(prompt, [1, 2, 3]) == 0.0 and copied_tokens(prompt, []) == 0.0


def test_shared_phrase_counts_answers_not_places() -> None:
    assert shared_phrase([[1, 2, 3, 9, 1, 2, 3], [8, 1, 2, 3], [4, 5, 6], [7]]) == pytest.approx(0.5)
    assert shared_phrase([[1, 2], [1, 2]]) == 0.0 and shared_phrase([[3, 3, 3]]) == 1.0


def experience(texts: Sequence[str], scores: Sequence[float], group: int = 2) -> Experience:
    """`group` samples a prompt; every answer ends by itself but the last."""
    tok = byte_tokenizer()
    ids = [tok(text, add_special_tokens=False)["input_ids"] + [1] for text in texts]
    ids[-1] = ids[-1][:-1]
    finished = [True] * (len(ids) - 1) + [False]
    groups = [slice(start, start + group) for start in range(0, len(ids), group)]
    rollout = Rollout(
        answers=[ids[group] for group in groups],
        logp=[[[-1.0] * len(one) for one in ids[group]] for group in groups],
        finished=[finished[group] for group in groups],
    )
    prompts = [tok("copy me", add_special_tokens=False)["input_ids"] for _ in groups]
    return gather(
        tok, [row(number) for number in range(len(groups))], prompts, rollout,
        scoring([Fixed(("quality",), [[score] for score in scores])], penalty=0.0),
    )  # fmt: skip


def test_a_step_whose_scorers_all_say_nothing() -> None:
    tok = byte_tokenizer()
    ids = tok("hello", add_special_tokens=False)["input_ids"]
    rollout = Rollout(answers=[[ids, ids]], logp=[[[-1.0] * 5] * 2], finished=[[True, True]])
    for value, errors in ((None, 0.0), ("boom", 1.0)):
        silent = scoring([Fixed(("quality",), [[value], [value]])])
        found = gather(tok, [row(0)], [ids], rollout, silent)
        values = measure(found, torch.zeros_like(found.rollout_logp), own)
        assert (values["scorer_invalid"], values["scorer_errors"]) == (1.0, errors)
        assert (values["reward"], values["score_quality"], values["kl"]) == (0.0, 0.0, 0.0)
        assert values["zero_variance"] == 1.0 and values["answers"] == 2.0
        assert all(math.isfinite(number) for number in values.values())


def test_a_sample_alone_is_no_group_without_a_lesson() -> None:
    """ppo and reinforce_pp may take one sample a prompt: it is compared with those of the other prompts."""
    for rewards, share in (([1.0, 2.0, 3.0, 4.0], 0.0), ([0.1, 0.1, 0.1, 0.1], 1.0), ([0.0] * 4, 1.0)):
        alone = experience(["a", "b", "c", "d"], rewards, group=1)
        assert measure(alone, alone.rollout_logp, own)["zero_variance"] == share
    equal = experience(["a", "b", "c", "d"], [1.0, 1.0, 3.0, 4.0])
    assert measure(equal, equal.rollout_logp, own)["zero_variance"] == 0.5


def own(values: Sequence[float]) -> list[float]:
    return [float(value) for value in values]


def test_a_step_is_measured() -> None:
    found = experience(["copy me", "aaaaaaaa", "Dear judge, hello", "xyz"], [1.0, 2.0, 3.0, 6.0])
    ref = found.rollout_logp - 0.1 * found.mask
    values = measure(found, ref, own)
    assert values["reward"] == pytest.approx(3.0) and values["answers"] == 4
    assert values["length"] == pytest.approx((8 + 9 + 18 + 3) / 4)
    assert values["kl"] == pytest.approx(0.1 * 38 / 4) and values["entropy"] == pytest.approx(1.0)
    assert values["clipped"] == pytest.approx(0.25) and values["judge_directed"] == pytest.approx(0.25)
    # Of "aaaaaaaa" (EOS left out) 5 4-grams, 1 distinct; "copy me" is its prompt, all of it.
    assert values["repeated_tokens"] == pytest.approx(0.8 / 4)
    assert values["copied"] == pytest.approx(0.25)
    assert values["phrase"] == pytest.approx(0.25)


def test_the_end_of_an_answer_is_no_phrase() -> None:
    found = experience(["xab", "yab", "zab", "wab"], [0.0] * 4)
    assert measure(found, found.rollout_logp, own)["phrase"] == pytest.approx(0.25)
    same = experience(["abc", "abc", "abc", "abc"], [0.0] * 4)
    assert measure(same, torch.zeros_like(same.rollout_logp), own)["phrase"] == 1.0
