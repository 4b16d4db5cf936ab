from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.errors import ConfigurationError
from data.records import Prompt
from tests.training.tiny import byte_tokenizer, prompt, save_encoder
from training.config_rewards import RewardsParams
from training.experience import (
    Experience,
    Scoring,
    build_scorers,
    column_of,
    dimension_weights,
    gather,
    join,
    select,
)
from training.generate import Rollout
from training.score import Member, ScoreModel, load_backbone, load_score_tokenizer
from training.scorers import Answered, FunctionScorer, HttpScorer, Outcome


class Fixed:
    """A scorer that says what it was told."""

    def __init__(self, dimensions: tuple[str, ...], rows: Sequence[Sequence[float | str | None]]) -> None:
        self.name, self.dimensions = "fixed", dimensions
        self._rows = rows

    def score(self, answers: Sequence[Answered]) -> list[tuple[Outcome, ...]]:
        def outcome(value: float | str | None) -> Outcome:
            if value is None:
                return Outcome("invalid")
            return Outcome("error", message=value) if isinstance(value, str) else Outcome("score", value)

        assert len(answers) == len(self._rows)
        return [tuple(map(outcome, row)) for row in self._rows]

    def close(self) -> None:
        pass


def own(values: Sequence[float]) -> list[float]:
    return [float(value) for value in values]


def row(number: int) -> Prompt:
    return Prompt(prompt=prompt(f"question {number}"), id=str(number), group=str(number))


def answers(texts: Sequence[str], group: int = 2, **changes: Any) -> list[Answered]:
    return [
        Answered(row(index // group), text, changes.get("length", 5), changes.get("finished", True))
        for index, text in enumerate(texts)
    ]


def scoring(sources: Sequence[Any], limit: int = 40, **params: Any) -> Scoring:
    return Scoring(list(sources), RewardsParams.model_validate(params), limit, own)


TEXTS = ["one apple", "two pears", "three plums", "four figs"]


def test_one_dimension_is_the_score_itself() -> None:
    found = scoring([Fixed(("quality",), [[1.0], [2.0], [-3.0], [0.5]])])(answers(TEXTS), 2)
    assert found.reward.tolist() == [1.0, 2.0, -3.0, 0.5]
    assert found.known.all() and found.errors == 0 and found.calls == 4 and found.detected.sum() == 0


def test_dimensions_are_weighted_by_what_is_in_use() -> None:
    # .25 quality, .35 factuality, .40 safety: .8, .6, .9 give .77; without factuality (.25 .8 + .4 .9) / .65.
    three = Fixed(("quality", "factuality", "safety"), [[0.8, 0.6, 0.9]] * 4)
    assert scoring([three])(answers(TEXTS), 2).reward.tolist() == pytest.approx([0.77] * 4)
    two = [Fixed(("quality",), [[0.8]] * 4), Fixed(("safety",), [[0.9]] * 4)]
    assert scoring(two)(answers(TEXTS), 2).reward.tolist() == pytest.approx([0.56 / 0.65] * 4)


def test_two_scorers_of_a_dimension_are_averaged() -> None:
    both = [Fixed(("quality",), [[1.0]] * 4), Fixed(("quality",), [[2.0], [3.0], [4.0], [5.0]])]
    found = scoring(both)(answers(TEXTS), 2)
    assert found.dimensions == ("quality",) and found.reward.tolist() == [1.5, 2.0, 2.5, 3.0]


def test_weights_need_the_dimension_and_a_sum() -> None:
    assert dimension_weights(("a", "b"), {"a": 1.0, "b": 3.0, "c": 9.0}) == [0.25, 0.75]
    with pytest.raises(ConfigurationError, match=r"no weight for \['style'\]"):
        dimension_weights(("style",), {"quality": 1.0})
    with pytest.raises(ConfigurationError, match="sum to 0"):
        dimension_weights(("a",), {"a": 0.0})


@pytest.mark.parametrize(("bad", "errors"), [(None, 0), ("boom", 1)])
def test_a_failure_is_masked_and_never_a_zero(bad: str | None, errors: int) -> None:
    found = scoring([Fixed(("quality",), [[-5.0], [bad], [-6.0], [-7.0]])])(answers(TEXTS), 2)
    assert found.known.tolist() == [True, False, True, True]
    assert found.errors == errors and found.first_error == (bad or "")
    assert (found.unknown, found.asked) == (1, 4), "what gives no reward is counted, whatever it is called"
    # The place of a failure holds a 0 that nothing may read: it is not known.
    assert found.reward.tolist() == [-5.0, 0.0, -6.0, -7.0]


def test_the_first_error_is_kept() -> None:
    scorer = Fixed(("quality",), [["first"], ["second"], [1.0], [1.0]])
    measured = scoring([scorer])
    measured(answers(TEXTS), 2)
    scorer._rows = [["third"]] * 4
    assert measured(answers(TEXTS), 2).first_error == "first"


def test_one_failed_dimension_makes_the_answer_unknown() -> None:
    scorer = Fixed(("quality", "safety"), [[1.0, None], [1.0, 1.0], [None, 1.0], [1.0, 1.0]])
    assert scoring([scorer])(answers(TEXTS), 2).known.tolist() == [False, True, False, True]
    values, valid = column_of([[Outcome("score", 2.0)], [Outcome("error")]])
    assert not valid[0] and values.shape == (1,)


def test_cheating_costs_the_penalty() -> None:
    texts = ["Dear judge, hello.", "a b c d " * 30, "question 1 question 1", "fine words here"]
    found = scoring([Fixed(("quality",), [[1.0]] * 4)], penalty=0.5)(answers(texts), 2)
    assert found.detected[0] == 1.0 and found.detected[1] > 0.9 and found.detected[3] == 0
    assert found.reward.tolist() == pytest.approx([1 - 0.5 * x for x in found.detected.tolist()])
    assert found.repetition[1] > 0.9 and found.repetition[0] == 0


@pytest.mark.parametrize(
    ("kind", "factor", "typical", "taken"),
    [
        ("learned", None, 20.0, 0.25),  # 90 of 3 x 20 tokens: half of the evidence, half of a point each
        ("learned", 2.0, 20.0, 0.5),
        ("learned", 0.0, 20.0, 0.0),
        ("learned", None, None, 0.0),  # The first step is what the others are measured by.
        ("learned", None, 2.0, 0.5 * (90 / 48 - 1)),  # Two words at the start: 16 tokens count as typical.
        ("function", None, 20.0, 0.0),  # A check is not won by padding.
        ("function", 3.0, 20.0, 0.25),
        ("http", None, 20.0, 0.25),
    ],
)
def test_an_answer_far_longer_than_the_first_ones_is_taken_for_padded(
    kind: str, factor: float | None, typical: float | None, taken: float
) -> None:
    path = {"function": "json:loads", "http": "http://127.0.0.1:9/score"}.get(kind)
    own = {"kind": kind, "name": "s"} | ({"path": path} if path else {})
    measured = scoring([Fixed(("quality",), [[1.0]] * 4)], scorers=[own], length_factor=factor)
    measured.typical = typical
    long = measured(answers(TEXTS, length=90), 2)
    assert long.reward.tolist() == pytest.approx([1.0 - taken] * 4)
    assert long.detected.tolist() == pytest.approx([2 * taken] * 4)
    assert measured(answers(TEXTS, length=15), 2).reward.tolist() == [1.0] * 4


def test_a_cut_answer_pays_and_a_long_one_where_asked() -> None:
    scorer = Fixed(("quality",), [[1.0]] * 4)
    cut = answers(TEXTS, finished=False)
    assert scoring([scorer], missing_eos=0.3)(cut, 2).reward.tolist() == pytest.approx([0.7] * 4)
    assert scoring([scorer])(cut, 2).reward.tolist() == [1.0] * 4
    # limit 40, buffer 10: 35 tokens lie in the middle of the ramp.
    long = answers(TEXTS, length=35)
    assert scoring([scorer], overlong_buffer=10)(long, 2).reward.tolist() == pytest.approx([0.5] * 4)


def test_an_empty_answer_is_no_better_than_the_worst_of_its_group() -> None:
    scorer = Fixed(("quality",), [[9.0], [1.0], [-2.0], [3.0]])
    found = scoring([scorer])(answers(["", "words", " \n", "words"]), 2)
    assert found.reward.tolist() == [1.0, 1.0, -2.0, 3.0]
    alone = scoring([Fixed(("quality",), [[9.0], [8.0]])])(answers(["", ""]), 2)
    assert alone.reward.tolist() == [9.0, 8.0], "a group of empty answers keeps its own scores"


def test_floors_cap_what_other_dimensions_could_buy() -> None:
    scorers = (
        {"kind": "http", "name": "a", "path": "http://x", "dimension": "quality"},
        {"kind": "http", "name": "b", "path": "http://x", "dimension": "safety", "floor": -1.0},
    )
    rows = [[10.0, -2.0], [10.0, 0.0], [-9.0, -2.0], [0.0, 0.0]]
    found = scoring([Fixed(("quality", "safety"), rows)], scorers=scorers, cap=0.0)(answers(TEXTS), 2)
    plain = [(0.25 * q + 0.4 * s) / 0.65 for q, s in rows]
    assert found.reward.tolist() == pytest.approx([0.0, plain[1], plain[2], plain[3]])


def test_of_several_floors_of_a_dimension_the_strictest_holds() -> None:
    def scorer(name: str, floor: float | None) -> dict[str, Any]:
        return {"kind": "http", "name": name, "path": "http://x", "dimension": "safety", "floor": floor}

    rows = [[10.0, -2.0], [10.0, -0.5], [10.0, 0.5], [10.0, 1.5]]
    plain = [(0.25 * q + 0.4 * s) / 0.65 for q, s in rows]
    for floors in ((-1.0, 1.0, None), (1.0, None, -1.0), (None, -1.0, 1.0)):
        scorers = tuple(scorer(name, floor) for name, floor in zip("abc", floors, strict=True))
        found = scoring([Fixed(("quality", "safety"), rows)], scorers=scorers, cap=0.0)(answers(TEXTS), 2)
        assert found.reward.tolist() == pytest.approx([0.0, 0.0, 0.0, plain[3]]), floors


@pytest.fixture
def two_heads(tmp_path: Path) -> Path:
    """A published model with the heads helpful and safety."""
    backbone, kind = load_backbone(save_encoder(tmp_path / "encoder"))
    settings = {"kind": kind, "heads": ["helpful", "safety"], "members": 1, "max_length": 64}
    tok = load_score_tokenizer(tmp_path / "encoder", kind)
    ScoreModel([Member(backbone, kind, 2, 5)], tok, settings, "fp32").save(tmp_path / "score")
    return tmp_path / "score"


def test_a_floor_guards_the_head_that_it_names(two_heads: Path) -> None:
    given = answers(TEXTS)
    columns = ScoreModel.load(two_heads).score([(answer.prompt.prompt, answer.text) for answer in given])
    for head, name in enumerate(("helpful", "safety")):
        bound = float(columns[:, head].sort().values[2])  # two of four answers lie below
        scorer = {"kind": "learned", "name": "r", "dimension": name, "floor": bound}
        params = {"scorers": [scorer], "weights": {"helpful": 1.0, "safety": 1.0}, "cap": -50.0}
        built = build_scorers(RewardsParams.model_validate(params), two_heads)
        found = scoring(built, **params)(given, 2)
        assert ((found.reward == -50.0) == (columns[:, head] < bound)).all()
        assert int((found.reward == -50.0).sum()) == 2


def test_the_model_named_twice_has_floors_on_two_heads(two_heads: Path) -> None:
    given = answers(TEXTS)
    columns = ScoreModel.load(two_heads).score([(answer.prompt.prompt, answer.text) for answer in given])
    bounds = [float(columns[:, head].sort().values[1]) for head in (0, 1)]  # one answer below each
    scorers = [
        {"kind": "learned", "name": name, "dimension": name, "floor": bound}
        for name, bound in zip(("helpful", "safety"), bounds, strict=True)
    ]
    params = {"scorers": scorers, "weights": {"helpful": 1.0, "safety": 1.0}, "cap": -50.0}
    found = scoring(build_scorers(RewardsParams.model_validate(params), two_heads), **params)(given, 2)
    below = (columns < torch.tensor(bounds)).any(1)
    assert ((found.reward == -50.0) == below).all() and bool(below.any()) and not bool(below.all())


def test_a_floor_on_no_head_of_the_model_is_refused(two_heads: Path) -> None:
    scorer = {"kind": "learned", "name": "r", "floor": 0.0}
    with pytest.raises(ConfigurationError, match=r"r: its floor is on dimension 'quality'.*helpful, safety"):
        build_scorers(RewardsParams.model_validate({"scorers": [scorer]}), two_heads)
    free = RewardsParams.model_validate({"scorers": [{**scorer, "floor": None}]})
    assert build_scorers(free, two_heads)[0].dimensions == ("helpful", "safety")


def whitened(values: Sequence[float]) -> list[float]:
    mean = sum(values) / len(values)
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return [(v - mean) / std for v in values]


def test_normalising_over_the_batch() -> None:
    rows = [[1.0, 100.0], [2.0, -50.0], [4.0, 0.0], [0.0, 30.0]]
    found = scoring([Fixed(("quality", "safety"), rows)], normalise="batch")(answers(TEXTS), 2)
    columns = [whitened([r[place] for r in rows]) for place in (0, 1)]
    expected = [(0.25 * a + 0.4 * b) / 0.65 for a, b in zip(*columns, strict=True)]
    assert found.reward.tolist() == pytest.approx(expected, abs=1e-6)


def test_normalising_over_the_group_is_gdpo() -> None:
    # GOLDEN's rows, equal weights; epsilon 1e-4 moves the fourth digit.
    rows = [[1.0, 10.0], [0.0, -10.0], [1.0, 0.0], [0.0, 0.0]]
    settings: dict[str, Any] = {"normalise": "group", "weights": {"a": 1.0, "b": 1.0}}
    found = scoring([Fixed(("a", "b"), rows)], **settings)(answers(TEXTS, group=4), 4)
    centred = []
    for place in (0, 1):
        column = [r[place] for r in rows]
        mean = sum(column) / 4
        std = math.sqrt(sum((v - mean) ** 2 for v in column) / 3)
        centred.append([(v - mean) / (std + 1e-4) for v in column])
    summed = whitened([0.5 * a + 0.5 * b for a, b in zip(*centred, strict=True)])
    assert found.reward.tolist() == pytest.approx(summed, abs=1e-5)


def test_the_group_is_a_prompts_own_and_cheating_is_paid_after_it() -> None:
    # deviations of 1, 2, 3 are 1, of 10, 10, 40 17.32: (x - mean) / (std + 1e-4), whitened over all six;
    # the third answer repeats itself, 3 of 4 words' grams: full evidence costs .5 of what it is worth
    texts = [*TEXTS[:2], "la " * 200, *TEXTS[1:]]
    scores = [1.0, 2.0, 3.0, 10.0, 10.0, 40.0]
    found = scoring([Fixed(("quality",), [[score] for score in scores])], normalise="group")(
        answers(texts, group=3), 3
    )
    groups = [[-1.0, 0.0, 1.0], [-10.0, -10.0, 20.0]]
    stds = [1.0, math.sqrt(600.0 / 2)]
    raw = [value / (std + 1e-4) for group, std in zip(groups, stds, strict=True) for value in group]
    expected = whitened(raw)
    assert found.detected[2] > 0.9 and found.detected.count_nonzero() == 1
    expected[2] -= 0.5 * float(found.detected[2])
    assert found.reward.tolist() == pytest.approx(expected, abs=1e-6)


def test_without_a_floor_a_low_score_is_what_it_is() -> None:
    found = scoring([Fixed(("quality",), [[-5.0], [1.0]])], cap=-10.0)(answers(TEXTS[:2]), 2)
    assert found.reward.tolist() == [-5.0, 1.0]


def test_length_is_no_cheating_of_its_own() -> None:
    for limit in (1, 40):
        found = scoring([Fixed(("quality",), [[1.0], [1.0]])], limit)(answers(TEXTS[:2], length=limit), 2)
        assert found.detected.tolist() == [0.0, 0.0]


def test_an_unknown_answer_pays_nothing_and_an_empty_one_looks_into_its_own_group() -> None:
    scorer = Fixed(("quality",), [[1.0], [None], [3.0], [7.0], [9.0], [8.0]])
    texts = [*TEXTS[:3], "", *TEXTS[1:3]]
    found = scoring([scorer], missing_eos=0.5)(answers(texts, group=3, finished=False), 3)
    assert found.reward.tolist() == [0.5, 0.0, 2.5, 6.5, 8.5, 7.5]
    found = scoring([Fixed(("quality",), [[1.0], [None], [3.0], [70.0], [9.0], [8.0]])])(
        answers(texts, group=3), 3
    )
    assert found.reward.tolist() == [1.0, 0.0, 3.0, 8.0, 9.0, 8.0], "the worst of the second group"


def test_a_floor_needs_the_scores_own_scale() -> None:
    scorers = ({"kind": "http", "name": "a", "path": "http://x", "floor": 0.0},)
    with pytest.raises(ValueError, match="normalise: batch changes the scale"):
        RewardsParams.model_validate({"scorers": scorers, "normalise": "batch"})


# -- gathering -----------------------------------------------------------------------------------------------


def rollout() -> Rollout:
    return Rollout(
        answers=[[[50, 51, 1], [52, 53, 54, 55]], [[1], [60, 1]]],
        logp=[[[-0.1, -0.2, -0.3], [-1.0, -1.1, -1.2, -1.3]], [[-2.0], [-3.0, -3.1]]],
        finished=[[True, False], [True, True]],
        states=[torch.full((9, 2), 1.0), torch.full((5, 2), 2.0)],
    )


def experience(scores: Sequence[float | None] = (1.0, 2.0, None, 4.0)) -> Experience:
    scorer = Fixed(("quality",), [[score] for score in scores])
    return gather(byte_tokenizer(), [row(0), row(1)], [[7, 8], [9, 10]], rollout(), scoring([scorer]))


def test_gathering_keeps_order_lengths_and_masks() -> None:
    found = experience()
    assert [answer.length for answer in found.answers] == [3, 4, 1, 2]
    assert [answer.finished for answer in found.answers] == [True, False, True, True]
    assert found.answers[2].text == "" and found.answers[0].prompt.id == "0"
    assert found.mask.sum(1).tolist() == [3, 4, 0, 2], "an unknown answer counts nowhere"
    assert found.rollout_logp[3].tolist() == pytest.approx([-3.0, -3.1, 0.0, 0.0])
    assert [tree.key for tree in found.trees] == ["0", "1"] and found.trees[1].answers == [[1], [60, 1]]
    assert found.grouped(found.scored.reward).shape == (2, 2)


def same(first: Experience, second: Experience) -> bool:
    def equal(a: Tensor, b: Tensor) -> bool:
        width = min(a.shape[1], b.shape[1]) if a.ndim == 2 else None
        return torch.equal(a[:, :width], b[:, :width]) if a.ndim == 2 else torch.equal(a, b)

    return (
        first.trees == second.trees
        and first.answers == second.answers
        and equal(first.mask, second.mask)
        and equal(first.rollout_logp, second.rollout_logp)
        and torch.equal(first.scored.reward, second.scored.reward)
        and torch.equal(first.scored.known, second.scored.known)
        and [s.tolist() for s in first.states or []] == [s.tolist() for s in second.states or []]
    )


def test_selecting_and_joining_undo_each_other() -> None:
    whole = experience()
    parts = [select(whole, [0]), select(whole, [1])]
    assert [len(part.trees) for part in parts] == [1, 1] and parts[1].answers[0].length == 1
    assert same(join(parts), whole)
    assert join([whole]) is whole
    swapped = join(parts[::-1])
    assert swapped.scored.reward.tolist() == [0.0, 4.0, 1.0, 2.0]
    assert swapped.trees[0].key == "1"
    assert select(whole, []).trees == []


def test_joined_answers_keep_every_token() -> None:
    short = select(experience(), [1])
    short = replace(short, mask=short.mask[:, :2], rollout_logp=short.rollout_logp[:, :2])
    long = select(experience(), [0])
    for parts in ([long, short], [short, long], [short, long, short]):
        found = join(parts)
        assert found.mask.sum() == sum(int(part.mask.sum()) for part in parts)
        assert found.mask.shape == (2 * len(parts), 4) and found.group == 2
        assert float(found.rollout_logp.sum()) == pytest.approx(
            sum(float(part.rollout_logp.sum()) for part in parts)
        )
        assert found.scored.calls == 4 * len(parts)


# -- building ------------------------------------------------------------------------------------------------


def judge(prompt: list[dict[str, str]], answer: str, reference: str | None, extra: dict[str, Any]) -> float:
    return float(len(answer))


def test_scorers_by_kind() -> None:
    params = RewardsParams.model_validate(
        {
            "scorers": [
                {"kind": "function", "name": "f", "path": "tests.training.test_experience:judge"},
                {"kind": "http", "name": "h", "path": "http://localhost:1/score", "dimension": "safety"},
            ]
        }
    )
    function, service = build_scorers(params, None)
    assert isinstance(function, FunctionScorer) and isinstance(service, HttpScorer)
    assert function.tally.limit == service.tally.limit == RewardsParams().error_limit < 1
    assert function.score(answers(["four"], 1))[0][0] == Outcome("score", 4.0)
    function.close()
    service.close()
    with pytest.raises(ConfigurationError, match=r"no path and no inputs\.reward"):
        build_scorers(RewardsParams(), None)
