"""Why a run did not converge or was not promoted: a decision tree as data, and the walk through it.

A node asks one question, has a function that gives the evidence as one number, two bounds for it, and the
next thing to try. Nodes below a node are asked only when its answer is not fine. The branches follow the
pipeline: whoever has bad data need not look at the learning rate, so the first cause on the path is the
headline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tasks import outcomes as o
from tasks import remedies as r
from tasks import symptoms as s
from tasks.evidence import Facts, Missing

Verdict = Literal["fine", "suspicious", "cause", "unknown"]


@dataclass(frozen=True)
class Node:
    """One question. `above`: the evidence is bad above the bounds, else at and below them."""

    question: str
    evidence: Callable[[Facts], s.Evidence]
    suspicious: float
    cause: float | None
    """None: never a cause by itself."""
    above: bool
    means: str
    """What a bad answer means, in a few words."""
    remedy: Callable[[Facts], r.Try]
    below: tuple[Node, ...] = ()

    def judge(self, found: s.Evidence) -> Verdict:
        """The side of the bounds that the evidence lies on."""
        if self.cause is not None and found.decisive and self._bad(found.value, self.cause):
            return "cause"
        return "suspicious" if self._bad(found.value, self.suspicious) else "fine"

    def _bad(self, value: float, bound: float) -> bool:
        return value > bound if self.above else value <= bound


@dataclass(frozen=True)
class Branch:
    """Questions that belong together, and the runs that they are asked of."""

    name: str
    applies: Callable[[Facts], bool]
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Answer:
    """What came of one question."""

    branch: str
    node: Node
    verdict: Verdict
    seen: str
    file: str
    value: float | None = None
    remedy: r.Try | None = None

    @property
    def bound(self) -> str:
        """The bound that decides: of a cause where it is one, else of suspicion."""
        bound = self.node.cause if self.verdict == "cause" else self.node.suspicious
        return f"{'at most' if self.node.above else 'above'} {bound:g}"


TREE: tuple[Branch, ...] = (
    Branch("run", s.always, (
        Node("Did each stage end well?", s.failed_stages, 0, 0, True,
             "a stage failed", r.after_failure),
    )),
    Branch("data", s.always, (
        Node("Were few rows refused?", s.refused, 0.1, 0.5, True,
             "most rows are unusable", r.refused_rows),
        Node("Are there enough pairs?", s.training_pairs, 300, 50, False,
             "too few preference pairs", r.more_pairs),
        # Chance is .5; crowd workers reach about .63 [2204.05862] to .73 [2203.02155].
        Node("Do annotators agree?", s.agreement, 0.7, 0.6, False,
             "annotators do not agree", r.annotate_again),
        # A share c of pairs labelled both ways holds every model's accuracy to 1 - c/2.
        Node("Are labels free of contradiction?", s.contradictions, 0.15, 0.3, True,
             "the labels contradict each other", r.annotate_again),
        Node("Is it more than length that is preferred?", s.data_length, 0.65, None, True,
             "length predicts the labels", r.balance_length),
    )),
    Branch("reward model", s.learned_reward, (
        Node("Is it tested on enough pairs?", s.reward_pairs, 1.5, 0.999, False,
             "too few held-out pairs to test the reward model", r.more_held_out),
        Node("Is it better than chance?", s.reward_chance, 0.55, 0.5, False,
             "the reward model is no better than chance", r.train_reward),
        Node("Is it better than length alone?", s.reward_length, 0.08, 0.02, False,
             "the reward model knows length and little else", r.beyond_length),
        Node("Are its chances calibrated?", s.calibration, 0.1, 0.25, True,
             "the reward model is far too sure", r.calibrate),
        Node("Does it spread the policy's answers?", s.saturation, 0.3, 0.1, False,
             "the reward is saturated on the policy's answers", r.spread_scores),
    )),
    Branch("SFT", s.always, (
        Node("Were few demonstrations dropped?", s.sft_dropped, 0.2, 0.5, True,
             "most demonstrations are too long", r.longer_rows),
        Node("Did its loss fall?", s.sft_loss, 0.02, 0.0, False,
             "supervised fine-tuning did not learn", r.sft_rate),
        Node("Do its answers end?", s.sft_stops, 0.5, 0.1, False,
             "answers never end: the EOS was not learned", r.teach_stopping),
    )),
    Branch("rollouts", s.on_policy, (
        Node("Do answers fit under the cap?", s.cut_answers, 0.85, 0.95, True,
             "no answer fits under max_new_tokens", r.longer_answers),
        Node("Do rewards differ within a group?", s.equal_groups, 0.3, 0.6, True,
             "answers of a group get equal rewards", r.vary_groups),
    )),
    Branch("hyper-parameters", s.always, (
        Node("Is every number finite?", o.nonfinite, 0, 0, True,
             "numbers that are not finite", r.exact_and_lower),
        Node("Is the KL near its target?", o.kl_blown, 2, 5, True,
             "the policy ran away: the learning rate is too high", r.lower_lr_try),
    )),
    Branch("hyper-parameters", s.on_policy, (
        Node("Does a gradient arrive?", o.gradient, 1e-4, 1e-8, False,
             "no gradient reaches the policy", r.find_gradient),
        Node("Is the gradient in proportion?", o.gradient_clipped, 20, None, True,
             "gradients are clipped to a fraction", r.lower_lr_try),
        Node("Do few tokens leave the ratio's bounds?", o.ratio_clipped, 0.2, 0.5, True,
             "the policy is far from its sampler", r.fewer_updates),
        Node("Does the policy stay open?", o.entropy, 0.5, 0.2, False,
             "the entropy has collapsed", r.keep_open),
        Node("Does the reward rise?", o.reward_rise, 2, -2, False,
             "the reward falls", r.lower_lr_try, (
                 Node("Did the policy move?", o.kl_small, 0.2, 0.05, False,
                      "the policy hardly moved: the learning rate is too low, or steps too few", r.move_more),
                 Node("Is the batch quiet enough?", o.batch_noise, 1, 2, True,
                      "the batch is too small for its noise", r.larger_batch),
             )),
    )),
    Branch("hyper-parameters", s.on_pairs, (
        Node("Are held-out pairs put right?", o.pair_accuracy, 0.55, 0.5, False,
             "the policy does not tell held-out pairs apart", r.learn_more, (
                 Node("Did the policy move?", o.kl_small, 0.05, 0.01, False,
                      "the policy hardly moved: the learning rate is too low, or steps too few", r.move_more),
             )),
    )),
    Branch("over-optimisation", s.on_policy, (
        Node("Does the judge follow the proxy?", o.gap, 0.5, 1.0, True,
             "the proxy is over-optimised", r.end_at_peak),
        Node("Is more reward better to the judge?", o.worse_with_reward, -0.05, 0.0, True,
             "the proxy is over-optimised: more reward, worse answers", r.end_at_peak),
        Node("Do lengths stay?", o.length_moved, 1.5, 2.0, True,
             "the reward is earned by length", r.hold_length),
        Node("Are answers free of repetition?", o.repetition, 0.2, 0.5, True,
             "answers repeat themselves", r.tighter_leash),
    )),
    Branch("guards", s.always, (
        Node("Did training end by itself?", o.guard, 0, 0, True,
             "a guard ended the training", r.lower_lr_try),
    )),
    Branch("evaluation", s.always, (
        Node("Is the judge better than chance?", o.judge_chance, 0.55, 0.5, False,
             "the judge is no better than chance", r.train_judge),
        Node("Is the judge better than length?", o.judge_length, 0.08, 0.0, False,
             "the judge knows length and little else", r.train_judge),
        Node("Are the prompts unseen?", o.overlap, 0, 0, True,
             "evaluation prompts were met in training", r.remove_overlap),
        Node("Has each prompt a verdict?", o.no_verdict, 0.5, 1.0, True,
             "too many prompts without a verdict", r.scorable),
        Node("Are there enough prompts?", o.power, 1.0, 1.0, True,
             "the evaluation has too few prompts to decide", r.more_prompts),
        Node("Is the candidate better?", o.better, 0.02, 0.0, False,
             "the candidate is no better than the champion", r.learn_more),
        Node("Is it better at equal length?", o.level, 0.02, 0.0, False,
             "it wins by length", r.hold_length),
        Node("Is it near the SFT model?", o.drift, 0.8, 1.0, True,
             "the candidate is too far from the SFT model", r.tighter_leash),
        Node("Are all slices kept?", o.slices, 0, 0, True,
             "some slices are worse", r.train_slice),
        Node("Are harmless prompts answered?", o.refusals, 0, 0, True,
             "harmless prompts are refused", r.less_refusal),
    )),
)  # fmt: skip


def walk(facts: Facts, tree: Sequence[Branch] = TREE) -> list[Answer]:
    """Every question that applies to the run, in the order of the path."""
    return [
        answer
        for branch in tree
        if branch.applies(facts)
        for node in branch.nodes
        for answer in _ask(branch.name, node, facts)
    ]


def _ask(branch: str, node: Node, facts: Facts) -> Iterator[Answer]:
    try:
        found = node.evidence(facts)
    except Missing as missing:
        yield Answer(branch, node, "unknown", f"not recorded: {missing}", "")
        return
    verdict = node.judge(found)
    remedy = node.remedy(facts) if verdict == "cause" else None
    yield Answer(branch, node, verdict, found.seen, found.file, found.value, remedy)
    if verdict != "fine":
        for below in node.below:
            yield from _ask(branch, below, facts)


def causes(answers: Sequence[Answer]) -> list[Answer]:
    """The causes in the order of the path; the first is the headline."""
    return [answer for answer in answers if answer.verdict == "cause"]
