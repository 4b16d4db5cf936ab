"""The decision tree: each question on both sides of its bounds, and whole walks with one thing wrong."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from tasks import evidence
from tasks.diagnosis import TREE, Answer, causes, walk
from tasks.evidence import Facts
from tasks.outcomes import NEVER, prompts_needed, trend
from tasks.overrides import write_overrides
from tasks.params import parse
from tasks.remedies import LADDER, lower_lr, raise_lr
from tasks.symptoms import sft_loss
from tests.tasks.constructed import facts, write_run
from training.config_optimize import OptimizeParams
from training.stats import wilson

DPO = {"optimize": {"algorithm": "dpo", "group": 1}}
PAIRS = {"optimize.accuracy_after": 0.7, "optimize.interval_after": [0.6, 0.8]}


def answer(question: str, changes: dict[str, Any], params: dict[str, Any] | None = None) -> Answer:
    """The last answer to a question (one may stand in two branches)."""
    return [found for found in walk(facts(changes, params)) if found.node.question == question][-1]


def test_a_healthy_run_has_no_cause_and_nothing_suspicious() -> None:
    assert [a.node.question for a in walk(facts()) if a.verdict != "fine"] == []
    assert len(walk(facts())) > 30


STEPS = {"reward": {"model": "policy", "process": {}}}


@pytest.mark.parametrize(
    ("question", "changes", "verdict"),
    [
        ("Is it tested on enough pairs?", {"reward.n": 9, "reward.prompts": 46}, "fine"),
        ("Is it tested on enough pairs?", {"reward.n": 900, "reward.prompts": 29}, "cause"),
        ("Is it tested on enough pairs?", {"reward.n": 900}, "unknown"),
        (
            "Is it better than chance?",
            {"reward.majority_baseline": 0.7, "reward.interval": [0.76, 1]},
            "fine",
        ),
        (
            "Is it better than chance?",
            {"reward.majority_baseline": 0.7, "reward.interval": [0.69, 1]},
            "cause",
        ),
        (
            "Is it better than chance?",
            {"reward.majority_baseline": 0.2, "reward.interval": [0.49, 1]},
            "cause",
        ),
    ],
)
def test_a_model_of_steps_is_asked_for_prompts_and_the_commoner_label(
    question: str, changes: dict[str, Any], verdict: str
) -> None:
    assert answer(question, changes, STEPS).verdict == verdict


def noisy(noise: float, rise: float = 1.0) -> list[float]:
    """Twelve rewards around a line, off by `noise`: the signs mirror, so the fitted line is the line."""
    return [rise * n / 11 + noise * (1, -1, -1, 1)[n % 4] for n in range(12)]


# question, then for each verdict the changes that must lead to it, on both sides of each bound
BOUNDS: list[tuple[str, dict[str, Any], str]] = [
    ("Were few rows refused?", {"validate.rows_refused": 100}, "fine"),
    ("Were few rows refused?", {"validate.rows_refused": 101}, "suspicious"),
    ("Were few rows refused?", {"validate.rows_refused": 500}, "suspicious"),
    ("Were few rows refused?", {"validate.rows_refused": 501}, "cause"),
    ("Are there enough pairs?", {"validate.pairs.train": 301}, "fine"),
    ("Are there enough pairs?", {"validate.pairs.train": 300}, "suspicious"),
    ("Are there enough pairs?", {"validate.pairs.train": 51}, "suspicious"),
    ("Are there enough pairs?", {"validate.pairs.train": 50}, "cause"),
    ("Do annotators agree?", {"validate.agreement.mean": 0.71}, "fine"),
    ("Do annotators agree?", {"validate.agreement.mean": 0.7}, "suspicious"),
    ("Do annotators agree?", {"validate.agreement.mean": 0.61}, "suspicious"),
    ("Do annotators agree?", {"validate.agreement.mean": 0.6}, "cause"),
    ("Are labels free of contradiction?", {"validate.agreement.contradicted_pairs": 150}, "fine"),
    ("Are labels free of contradiction?", {"validate.agreement.contradicted_pairs": 151}, "suspicious"),
    ("Are labels free of contradiction?", {"validate.agreement.contradicted_pairs": 301}, "cause"),
    ("Is it more than length that is preferred?", {"validate.length_baseline.accuracy": 0.65}, "fine"),
    ("Is it more than length that is preferred?", {"validate.length_baseline.accuracy": 0.99}, "suspicious"),
    ("Is it tested on enough pairs?", {"reward.n": 46}, "fine"),
    ("Is it tested on enough pairs?", {"reward.n": 30}, "suspicious"),
    ("Is it tested on enough pairs?", {"reward.n": 29}, "cause"),
    ("Is it better than chance?", {"reward.interval": [0.56, 0.9]}, "fine"),
    ("Is it better than chance?", {"reward.interval": [0.51, 0.9]}, "suspicious"),
    ("Is it better than chance?", {"reward.interval": [0.5, 0.9]}, "cause"),
    ("Is it better than length alone?", {"reward.length_baseline": 0.71}, "fine"),
    ("Is it better than length alone?", {"reward.length_baseline": 0.73}, "suspicious"),
    ("Is it better than length alone?", {"reward.length_baseline": 0.79}, "cause"),
    ("Are its chances calibrated?", {"reward.calibration.ece": 0.1}, "fine"),
    ("Are its chances calibrated?", {"reward.calibration.ece": 0.2}, "suspicious"),
    ("Are its chances calibrated?", {"reward.calibration.ece": 0.26}, "cause"),
    ("Does it spread the policy's answers?", {"optimize:reward_std": 0.31}, "fine"),
    ("Does it spread the policy's answers?", {"optimize:reward_std": 0.29}, "suspicious"),
    ("Does it spread the policy's answers?", {"optimize:reward_std": 0.09}, "cause"),
    ("Were few demonstrations dropped?", {"sft.dropped": {"long": 60}}, "fine"),
    ("Were few demonstrations dropped?", {"sft.dropped": {"long": 70}}, "suspicious"),
    ("Were few demonstrations dropped?", {"sft.dropped": {"long": 251}}, "cause"),
    ("Did its loss fall?", {"sft:loss": [3.0] * 6 + [2.9] * 6}, "fine"),
    ("Did its loss fall?", {"sft:loss": [3.0] * 6 + [2.99] * 6}, "suspicious"),
    ("Did its loss fall?", {"sft:loss": [3.0] * 12}, "cause"),
    ("Do its answers end?", {"sft.stop_share": 0.51}, "fine"),
    ("Do its answers end?", {"sft.stop_share": 0.5}, "suspicious"),
    ("Do its answers end?", {"sft.stop_share": 0.1}, "cause"),
    ("Do answers fit under the cap?", {"optimize:clipped": 0.85}, "fine"),
    ("Do answers fit under the cap?", {"optimize:clipped": 0.9}, "suspicious"),
    ("Do answers fit under the cap?", {"optimize:clipped": 0.96}, "cause"),
    ("Do rewards differ within a group?", {"optimize:zero_variance": 0.25}, "fine"),
    ("Do rewards differ within a group?", {"optimize:zero_variance": 0.5}, "suspicious"),
    ("Do rewards differ within a group?", {"optimize:zero_variance": 0.75}, "cause"),
    ("Is every number finite?", {"optimize:loss": 1.0}, "fine"),
    ("Is every number finite?", {"optimize:loss": [1.0] * 11 + ["nan"]}, "cause"),
    ("Is the KL near its target?", {"optimize:kl": 0.19}, "fine"),
    ("Is the KL near its target?", {"optimize:kl": 0.21}, "suspicious"),
    ("Is the KL near its target?", {"optimize:kl": -0.51}, "cause"),
    ("Does a gradient arrive?", {"optimize:grad_norm": 2e-4}, "fine"),
    ("Does a gradient arrive?", {"optimize:grad_norm": 1e-5}, "suspicious"),
    ("Does a gradient arrive?", {"optimize:grad_norm": 0.0}, "cause"),
    ("Is the gradient in proportion?", {"optimize:grad_norm": 20.0}, "fine"),
    ("Is the gradient in proportion?", {"optimize:grad_norm": 1e6}, "suspicious"),
    ("Do few tokens leave the ratio's bounds?", {"optimize:ratio_clipped": 0.1875}, "fine"),
    ("Do few tokens leave the ratio's bounds?", {"optimize:ratio_clipped": 0.3}, "suspicious"),
    ("Do few tokens leave the ratio's bounds?", {"optimize:ratio_clipped": 0.6}, "cause"),
    ("Does the policy stay open?", {"optimize:entropy": [1.0] * 6 + [0.51] * 6}, "fine"),
    ("Does the policy stay open?", {"optimize:entropy": [1.0] * 6 + [0.5] * 6}, "suspicious"),
    ("Does the policy stay open?", {"optimize:entropy": [1.0] * 6 + [0.19] * 6}, "cause"),
    ("Does the reward rise?", {"optimize:reward": noisy(0.3)}, "fine"),
    ("Does the reward rise?", {"optimize:reward": noisy(0.6)}, "suspicious"),
    ("Does the reward rise?", {"optimize:reward": noisy(0.6, -1.0)}, "suspicious"),
    ("Does the reward rise?", {"optimize:reward": noisy(0.3, -1.0)}, "cause"),
    ("Did the policy move?", {"optimize:reward": noisy(2.0), "optimize:kl": 0.021}, "fine"),
    ("Did the policy move?", {"optimize:reward": noisy(2.0), "optimize:kl": 0.02}, "suspicious"),
    ("Did the policy move?", {"optimize:reward": noisy(2.0), "optimize:kl": 0.005}, "cause"),
    ("Is the batch quiet enough?", {"optimize:reward": noisy(0.8)}, "fine"),
    ("Is the batch quiet enough?", {"optimize:reward": noisy(1.2)}, "suspicious"),
    ("Is the batch quiet enough?", {"optimize:reward": noisy(2.0)}, "cause"),
    ("Does the judge follow the proxy?", {"optimize:judge": [-1.0] * 11 + [-0.39]}, "fine"),
    ("Does the judge follow the proxy?", {"optimize:judge": [-1.0] * 11 + [-0.5]}, "suspicious"),
    ("Does the judge follow the proxy?", {"optimize:judge": -1.0}, "cause"),
    ("Is more reward better to the judge?", {"evaluate.interval": [0.4, 0.56]}, "fine"),
    ("Is more reward better to the judge?", {"evaluate.interval": [0.4, 0.54]}, "suspicious"),
    ("Is more reward better to the judge?", {"evaluate.interval": [0.4, 0.49]}, "cause"),
    (
        "Is more reward better to the judge?",
        {"evaluate.interval": [0.4, 0.49], "optimize.reward_after": -2.0},
        "fine",
    ),
    ("Do lengths stay?", {"optimize:length": [30.0] * 6 + [45.0] * 6}, "fine"),
    ("Do lengths stay?", {"optimize:length": [30.0] * 6 + [46.0] * 6}, "suspicious"),
    ("Do lengths stay?", {"optimize:length": [30.0] * 6 + [61.0] * 6}, "cause"),
    ("Do lengths stay?", {"optimize:length": [30.0] * 6 + [14.0] * 6}, "cause"),
    ("Are answers free of repetition?", {"optimize:repetition": 0.125}, "fine"),
    ("Are answers free of repetition?", {"optimize:repetition": 0.25}, "suspicious"),
    ("Are answers free of repetition?", {"optimize:repetition": 0.75}, "cause"),
    ("Did training end by itself?", {"optimize.status": "trained"}, "fine"),
    ("Did training end by itself?", {"optimize.status": "stopped_by_guard"}, "cause"),
    ("Is the judge better than chance?", {"judge.interval": [0.56, 0.9]}, "fine"),
    ("Is the judge better than chance?", {"judge.interval": [0.55, 0.9]}, "suspicious"),
    ("Is the judge better than chance?", {"judge.interval": [0.5, 0.9]}, "cause"),
    ("Is the judge better than length?", {"judge.length_baseline": 0.71}, "fine"),
    ("Is the judge better than length?", {"judge.length_baseline": 0.75}, "suspicious"),
    ("Is the judge better than length?", {"judge.length_baseline": 0.8}, "cause"),
    ("Are the prompts unseen?", {"evaluate.overlap": 1}, "cause"),
    ("Has each prompt a verdict?", {"evaluate.failure_share": 0.025}, "fine"),
    ("Has each prompt a verdict?", {"evaluate.failure_share": 0.05}, "suspicious"),
    ("Has each prompt a verdict?", {"evaluate.failure_share": 0.06}, "cause"),
    ("Are there enough prompts?", {"evaluate.n": 100}, "fine"),
    ("Are there enough prompts?", {"evaluate.n": 99}, "cause"),
    ("Are there enough prompts?", {"evaluate.win_rate": 0.55, "evaluate.n": 200}, "cause"),
    ("Are there enough prompts?", {"evaluate.win_rate": 0.5, "evaluate.n": 20}, "fine"),
    ("Is the candidate better?", {"evaluate.win_rate": 0.53}, "fine"),
    ("Is the candidate better?", {"evaluate.win_rate": 0.51}, "suspicious"),
    ("Is the candidate better?", {"evaluate.win_rate": 0.5}, "cause"),
    ("Is it better at equal length?", {"evaluate.length_controlled.estimate": 0.53}, "fine"),
    ("Is it better at equal length?", {"evaluate.length_controlled.estimate": 0.51}, "suspicious"),
    ("Is it better at equal length?", {"evaluate.length_controlled.estimate": 0.5}, "cause"),
    ("Is it near the SFT model?", {"evaluate.kl": 8.0}, "fine"),
    ("Is it near the SFT model?", {"evaluate.kl": 8.1}, "suspicious"),
    ("Is it near the SFT model?", {"evaluate.kl": 10.1}, "cause"),
    ("Are all slices kept?", {"evaluate.slices": [{"slice": "a", "worse": True}]}, "cause"),
    ("Are harmless prompts answered?", {"evaluate.rules.over_refusal_rise": 0.05}, "fine"),
    ("Are harmless prompts answered?", {"evaluate.rules.over_refusal_rise": 0.06}, "cause"),
    ("Are labels free of contradiction?", {"validate.agreement.contradicted_pairs": 300}, "suspicious"),
    ("Is it more than length that is preferred?", {"validate.length_baseline.accuracy": 0.66}, "suspicious"),
    ("Is it tested on enough pairs?", {"reward.n": 45}, "suspicious"),
    ("Is it better than chance?", {"reward.interval": [0.55, 0.9]}, "suspicious"),
    ("Is it better than length alone?", {"reward.length_baseline": 0.719}, "fine"),
    ("Is it better than length alone?", {"reward.length_baseline": 0.721}, "suspicious"),
    ("Is it better than length alone?", {"reward.length_baseline": 0.779}, "suspicious"),
    ("Is it better than length alone?", {"reward.length_baseline": 0.781}, "cause"),
    ("Are its chances calibrated?", {"reward.calibration.ece": 0.11}, "suspicious"),
    ("Are its chances calibrated?", {"reward.calibration.ece": 0.25}, "suspicious"),
    ("Does it spread the policy's answers?", {"optimize:reward_std": 0.11}, "suspicious"),
    ("Were few demonstrations dropped?", {"sft.dropped": {"long": 63}}, "suspicious"),
    ("Were few demonstrations dropped?", {"sft.dropped": {"long": 250}}, "suspicious"),
    ("Do its answers end?", {"sft.stop_share": 0.11}, "suspicious"),
    ("Do answers fit under the cap?", {"optimize:clipped": 0.86}, "suspicious"),
    ("Do answers fit under the cap?", {"optimize:clipped": 0.94}, "suspicious"),
    ("Do rewards differ within a group?", {"optimize:zero_variance": 0.29}, "fine"),
    ("Do rewards differ within a group?", {"optimize:zero_variance": 0.31}, "suspicious"),
    ("Do rewards differ within a group?", {"optimize:zero_variance": 0.59}, "suspicious"),
    ("Do rewards differ within a group?", {"optimize:zero_variance": 0.61}, "cause"),
    ("Is the KL near its target?", {"optimize:kl": 0.49}, "suspicious"),
    ("Does a gradient arrive?", {"optimize:grad_norm": 0.00011}, "fine"),
    ("Does a gradient arrive?", {"optimize:grad_norm": 9e-05}, "suspicious"),
    ("Is the gradient in proportion?", {"optimize:grad_norm": 20.1}, "suspicious"),
    ("Do few tokens leave the ratio's bounds?", {"optimize:ratio_clipped": 0.21}, "suspicious"),
    ("Do few tokens leave the ratio's bounds?", {"optimize:ratio_clipped": 0.49}, "suspicious"),
    ("Do few tokens leave the ratio's bounds?", {"optimize:ratio_clipped": 0.51}, "cause"),
    ("Are answers free of repetition?", {"optimize:repetition": 0.49}, "suspicious"),
    ("Are answers free of repetition?", {"optimize:repetition": 0.51}, "cause"),
    ("Are answers free of repetition?", {"optimize:repetition": 0.19}, "fine"),
    ("Are answers free of repetition?", {"optimize:repetition": 0.21}, "suspicious"),
    ("Is more reward better to the judge?", {"evaluate.interval": [0.4, 0.549]}, "suspicious"),
    ("Is more reward better to the judge?", {"evaluate.interval": [0.4, 0.501]}, "suspicious"),
    ("Is more reward better to the judge?", {"evaluate.interval": [0.4, 0.499]}, "cause"),
    ("Is the judge better than chance?", {"judge.interval": [0.51, 0.9]}, "suspicious"),
    ("Is the judge better than length?", {"judge.length_baseline": 0.719}, "fine"),
    ("Is the judge better than length?", {"judge.length_baseline": 0.721}, "suspicious"),
    ("Is the judge better than length?", {"judge.length_baseline": 0.799}, "suspicious"),
    ("Has each prompt a verdict?", {"evaluate.failure_share": 0.026}, "suspicious"),
    ("Is the candidate better?", {"evaluate.win_rate": 0.521}, "fine"),
    ("Is it better at equal length?", {"evaluate.length_controlled.estimate": 0.521}, "fine"),
    ("Is the candidate better?", {"evaluate.win_rate": 0.519}, "suspicious"),
    ("Is it better at equal length?", {"evaluate.length_controlled.estimate": 0.519}, "suspicious"),
    ("Is the candidate better?", {"evaluate.win_rate": 0.501}, "suspicious"),
    ("Is it better at equal length?", {"evaluate.length_controlled.estimate": 0.501}, "suspicious"),
    ("Is it near the SFT model?", {"evaluate.kl": 10.0}, "suspicious"),
    ("Did its loss fall?", {"sft:loss": [3.0] * 6 + [2.93] * 6}, "fine"),
    ("Did its loss fall?", {"sft:loss": [3.0] * 6 + [2.95] * 6}, "suspicious"),
    ("Does the policy stay open?", {"optimize:entropy": [1.0] * 6 + [0.21] * 6}, "suspicious"),
    ("Did the policy move?", {"optimize:reward": noisy(2.0), "optimize:kl": 0.006}, "suspicious"),
    ("Is the batch quiet enough?", {"optimize:reward": noisy(0.91)}, "fine"),
    ("Is the batch quiet enough?", {"optimize:reward": noisy(0.92)}, "suspicious"),
    ("Is the batch quiet enough?", {"optimize:reward": noisy(1.82)}, "suspicious"),
    ("Is the batch quiet enough?", {"optimize:reward": noisy(1.83)}, "cause"),
    ("Does the judge follow the proxy?", {"optimize:judge": [-1.0] * 11 + [-0.89]}, "suspicious"),
    ("Do lengths stay?", {"optimize:length": [30.0] * 6 + [59.0] * 6}, "suspicious"),
]


@pytest.mark.parametrize(("question", "changes", "verdict"), BOUNDS)
def test_both_sides_of_each_bound(question: str, changes: dict[str, Any], verdict: str) -> None:
    found = answer(question, changes)
    assert found.verdict == verdict, found
    assert found.file and found.seen
    assert (found.remedy is not None) == (verdict == "cause")


def test_bounds_of_pairs_methods() -> None:
    low = {**PAIRS, "optimize.interval_after": [0.5, 0.6]}
    for question, changes, verdict in (
        ("Are held-out pairs put right?", {"optimize.interval_after": [0.56, 0.8]}, "fine"),
        ("Are held-out pairs put right?", {"optimize.interval_after": [0.55, 0.8]}, "suspicious"),
        ("Are held-out pairs put right?", {"optimize.interval_after": [0.51, 0.8]}, "suspicious"),
        ("Are held-out pairs put right?", low, "cause"),
        ("Did the policy move?", {**low, "optimize.kl": 0.006}, "fine"),
        ("Did the policy move?", {**low, "optimize.kl": 0.005}, "suspicious"),
        ("Did the policy move?", {**low, "optimize.kl": 0.0011}, "suspicious"),
        ("Did the policy move?", {**low, "optimize.kl": 0.001}, "cause"),
        ("Is the KL near its target?", {"optimize.kl": 0.51}, "cause"),
    ):
        assert answer(question, {**PAIRS, **changes}, DPO).verdict == verdict, (question, changes)


def test_each_node_that_can_be_a_cause_is_tested_as_one() -> None:
    tested = {question for question, _, verdict in BOUNDS if verdict == "cause"}
    tested |= {"Are held-out pairs put right?", "Did each stage end well?"}
    nodes = [node for branch in TREE for top in branch.nodes for node in (top, *top.below)]
    assert {node.question for node in nodes if node.cause is not None} == tested


def test_few_repeated_judgements_are_no_cause() -> None:
    few = {"validate.agreement.mean": 0.3, "validate.agreement.pairs_judged_more_than_once": 199}
    assert answer("Do annotators agree?", few).verdict == "suspicious"
    few["validate.agreement.pairs_judged_more_than_once"] = 200
    assert answer("Do annotators agree?", few).verdict == "cause"


def test_a_failed_stage_is_the_headline_and_its_kind_decides() -> None:
    for kind, command in (
        ("data", "plumbline validate"),
        ("configuration", "plumbline doctor"),
        ("infrastructure", "plumbline run"),
        ("divergence", f"plumbline run --set reward.lr={1e-4 / 3:.3g}"),
    ):
        found = walk(facts(failed={"reward": {"kind": kind, "message": "row 7: no\nmore"}}))
        head = causes(found)[0]
        assert head.remedy is not None
        assert (head.seen, head.remedy.command) == (f"reward: {kind}: row 7: no", command)


def test_what_is_below_is_asked_only_when_the_answer_above_is_not_fine() -> None:
    questions = [a.node.question for a in walk(facts({"optimize:kl": 0.0}))]
    assert "Did the policy move?" not in questions
    assert "Does the reward rise?" in questions


def test_each_remedy_is_a_command_that_the_parameters_accept(tmp_path: Path) -> None:
    for question, changes, verdict in BOUNDS:
        if verdict != "cause":
            continue
        remedy = answer(question, changes).remedy
        assert remedy is not None and remedy.what
        if remedy.instead:
            assert remedy.instead.startswith("plumbline ")
            continue
        (tmp_path / "params.yaml").write_text("seed: 0\n")
        assert write_overrides(tmp_path, remedy.settings), question
        assert remedy.command == "plumbline run " + " ".join(f"--set {one}" for one in remedy.settings)


@pytest.mark.parametrize(
    ("losses", "decisive"),
    [([2.5, 2.4, 2.6, 2.5, 2.6, 2.7], False), ([2.5, 2.9, 3.6, 4.5], True), ([2.5] * 12, True)],
)
def test_a_few_noisy_steps_of_sft_are_no_cause(losses: list[float], decisive: bool) -> None:
    rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    assert sft_loss(Facts(parse({}, "test"), metrics={"sft": rows})).decisive == decisive


def test_learning_rates_go_down_the_ladder_and_adapters_by_a_factor() -> None:
    full = OptimizeParams.model_validate({"lora": None, "lr": 1e-4})
    seen = []
    for _ in range(7):
        full = full.model_copy(update={"lr": lower_lr(full)})
        seen.append(full.lr)
    assert seen == [*LADDER, 5e-8]
    assert raise_lr(full) == 1e-7
    assert raise_lr(full.model_copy(update={"lr": 5e-6})) is None
    adapters = OptimizeParams.model_validate({"lr": 3e-4})
    assert (lower_lr(adapters), raise_lr(adapters)) == pytest.approx((1e-4, 9e-4))


def test_at_the_top_of_the_ladder_more_steps_are_asked_for() -> None:
    found = walk(facts({"optimize:reward": noisy(2.0), "optimize:kl": 0.0}, {"optimize": {"lora": None}}))
    remedy = causes(found)[0].remedy
    assert remedy is not None and remedy.settings == ("optimize.steps=80",)


def test_won_by_length_without_metrics_of_length_asks_for_the_leash() -> None:
    level = {**PAIRS, "evaluate.length_controlled.estimate": 0.4, "optimize:length": "none"}
    found = answer("Is it better at equal length?", level, DPO)
    assert found.remedy is not None and found.remedy.settings == ("optimize.beta=0.1",)
    grown = answer("Do lengths stay?", {"optimize:length": [30.0] * 6 + [99.0] * 6})
    shrunk = answer("Do lengths stay?", {"optimize:length": [99.0] * 6 + [30.0] * 6})
    assert grown.remedy is not None and "optimize.rewards.overlong_buffer=16" in grown.remedy.settings
    assert shrunk.remedy is not None and "optimize.rewards.missing_eos=0" in shrunk.remedy.settings


def test_what_a_reward_model_needs_depends_on_its_training_pairs() -> None:
    for fitted, wanted in ((0.95, "reward.weight_decay=0.1"), (0.6, "reward.max_steps=null")):
        found = answer("Is it better than chance?", {**WEAK, "reward.train_accuracy": fitted})
        assert found.remedy is not None and wanted in found.remedy.settings


def test_prompts_needed_is_the_first_that_is_enough() -> None:
    for rate in (0.55, 0.6, 0.75):
        n = prompts_needed(rate, 0.95)
        assert wilson(rate * n, n).lower > 0.5 >= wilson(rate * (n - 1), n - 1).lower
    assert prompts_needed(0.5, 0.95) == prompts_needed(0.501, 0.95) == NEVER


def test_trend_by_hand() -> None:
    # y = 0, 1, 2, 5: slope (-1.5*0 - .5*1 + .5*2 + 1.5*5) / 5 = 1.6; residuals .4, -.2, -.8, .6: their
    # squares sum to 1.2, over n - 2 = 2: .6; error of the slope sqrt(.6 / 5), of three steps 3 times it.
    assert trend([0.0, 1.0, 2.0, 5.0]) == pytest.approx((4.8, 3 * math.sqrt(0.12), math.sqrt(0.6)))


def test_missing_numbers_are_unknown_and_name_their_file() -> None:
    for question, changes, said in (
        ("Do its answers end?", {"sft.stop_share": None}, "sft/result.json: stop_share is None"),
        ("Is it better than chance?", {"reward": None}, "reward/result.json is missing"),
        ("Is it better than chance?", {"reward.interval": [0.1]}, "interval"),
        ("Is it better than chance?", {"reward.accuracy": True}, "accuracy is True"),
        ("Are its chances calibrated?", {"reward.calibration": 3}, "calibration.ece is None"),
        ("Is it near the SFT model?", {"evaluate": {"status": "not_run", "reason": "no judge"}}, "no judge"),
        ("Does the reward rise?", {"optimize:reward": ["nan"] * 12}, "recorded at 0 steps; at least 4"),
        ("Are all slices kept?", {"evaluate.slices": None}, "slices is missing"),
        ("Were few demonstrations dropped?", {"sft.dropped": None}, "dropped is missing"),
        ("Are labels free of contradiction?", {"validate.pairs": None}, "pairs is missing"),
    ):
        found = answer(question, changes)
        assert found.verdict == "unknown", found
        assert said in found.seen, found.seen


# -- folders -----------------------------------------------------------------------------------------------

BAD_DATA = {
    "validate.agreement": {"mean": 0.5, "pairs_judged_more_than_once": 800, "contradicted_pairs": 400},
    "reward.interval": [0.42, 0.6], "reward.accuracy": 0.52, "optimize": {"status": "not_run"},
}  # fmt: skip
WEAK = {"reward.interval": [0.45, 0.63], "reward.accuracy": 0.55, "optimize": {"status": "not_run"}}
LENGTH = {"reward.accuracy": 0.71, "reward.length_baseline": 0.7, "reward.interval": [0.62, 0.8]}
HIGH = {
    "optimize:kl": [0.05 * 1.6**n for n in range(12)],
    "optimize:reward": noisy(0.3, -1.0),
    "optimize.status": "stopped_by_guard",
    "evaluate.win_rate": 0.3,
    "evaluate.interval": [0.2, 0.4],
}
LOW = {
    "optimize:kl": 1e-4, "optimize:reward": noisy(1.0, 0.1), "evaluate.win_rate": 0.5,
    "evaluate.interval": [0.43, 0.57],
}  # fmt: skip
GAMED = {
    "optimize:judge": [-1.0 + 0.1 * n for n in range(5)] + [-0.6 - 0.2 * n for n in range(7)],
    "evaluate.win_rate": 0.4,
    "evaluate.interval": [0.33, 0.47],
}
FEW = {"evaluate.n": 60, "evaluate.win_rate": 0.6, "evaluate.interval": [0.47, 0.72]}


@pytest.mark.parametrize(
    ("changes", "headline", "settings"),
    [
        (BAD_DATA, "annotators do not agree", "reward.smoothing=0.1"),
        (WEAK, "the reward model is no better than chance", "reward.epochs=4"),
        (LENGTH, "the reward model knows length and little else", "reward.model=policy"),
        (HIGH, "the policy ran away: the learning rate is too high", "optimize.lr=2e-06"),
        (LOW, "the policy hardly moved: the learning rate is too low, or steps too few", "optimize.steps=80"),
        (GAMED, "the proxy is over-optimised", "optimize.steps=5"),
        (FEW, "the evaluation has too few prompts to decide", "evaluate.prompts=200"),
    ],
)
def test_a_whole_walk_finds_the_headline(
    tmp_path: Path, changes: dict[str, Any], headline: str, settings: str
) -> None:
    write_run(tmp_path, changes, "optimize: {lora: null, lr: 5.0e-6}\n")
    head = causes(walk(evidence.gather(tmp_path)))[0]
    assert head.node.means == headline
    assert head.remedy is not None and settings in head.remedy.settings, head.remedy


def test_half_written_files_are_unknown_and_cut_lines_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, {})
    stages = tmp_path / "data" / "stages"
    (stages / "reward" / "result.json").write_text('{"accuracy": 0.')
    metrics = stages / "optimize" / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-20])
    (stages / "sft" / "metrics.jsonl").unlink()
    found = evidence.gather(tmp_path)
    assert len(found.metrics["optimize"]) == 11
    unknown = {a.node.question: a.seen for a in walk(found) if a.verdict == "unknown"}
    assert "reward/result.json is half written or damaged" in unknown["Is it better than chance?"]
    assert "sft/metrics.jsonl" in unknown["Did its loss fall?"]


def test_nothing_there_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("{}\n")
    with pytest.raises(evidence.DataError, match="plumbline run"):
        evidence.gather(tmp_path)


def test_parameters_are_those_of_the_run_unless_its_stage_failed_since(tmp_path: Path) -> None:
    write_run(tmp_path, {}, "optimize: {lr: 1.0e-3}\nreward: {epochs: 7}\n")
    (tmp_path / "dvc.lock").write_text(
        "stages: {optimize: {params: {params.yaml: {optimize: {lr: 2.0e-3}, sft: {lr: 9.0}}}}}\n"
    )
    used = evidence.gather(tmp_path).params
    assert (used.optimize.lr, used.reward.epochs, used.sft.lr) == (2e-3, 7, parse({}, "x").sft.lr)
    status = tmp_path / ".plumbline" / "status"
    status.mkdir(parents=True, exist_ok=True)
    (status / "optimize.json").write_text('{"state": "failed", "kind": "divergence", "message": "nan"}')
    found = evidence.gather(tmp_path)
    assert found.params.optimize.lr == 1e-3
    assert list(found.failed) == ["optimize"]
    (status / "optimize.json").write_text('{"state"')
    (tmp_path / "dvc.lock").write_text("stages: {")
    found = evidence.gather(tmp_path)
    assert (found.failed, found.params.optimize.lr) == ({}, 1e-3)


def test_facts_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        facts().params = parse({}, "x")  # type: ignore[misc]
