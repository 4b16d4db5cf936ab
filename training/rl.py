"""On-policy optimisation: `python -m training.launch -m training.rl WORKDIR`.

    answers ~ policy, scores, reward = sum of weighted scores - penalties [- beta KL], advantage, update
    [loss + beta KL]

One program for RLOO, GRPO, Dr. GRPO, DAPO, GSPO, CISPO, REINFORCE++, PPO and online DPO: what distinguishes
them are three functions by name, ADVANTAGES or TOKEN_ADVANTAGES (advantages.py), POLICY_LOSSES and
AGGREGATION_OF (losses.py), and here DAPO's dynamic sampling. The reference is the policy itself without its
adapters; a model's own dropout is off. With one update a rollout the old policy is the present one, and
nothing is computed twice.

In: `model`, `prompts`, `reward` (for learned scores) and `judge` (a guard's second opinion, never trained
against). Out: model/, metrics, journal. A run that a guard ended publishes its last healthy weights, exits 0,
and says so in its status.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from data.errors import Stopped
from data.records import Prompt
from training import advantages, guards, kl, preflight
from training.batches import Tree, epoch_order
from training.chat import encode_prompt, template_hash
from training.config_optimize import OptimizeParams
from training.device import resolve
from training.experience import Experience, Scored, gather, join, select, summed
from training.generate import BuiltinGenerator
from training.learner import Rolled, Signals
from training.measure import measure, second_opinion
from training.models import digest, merge_and_save, saved_dtype
from training.rl_setting import Clock, Setting, set_up
from training.rl_watch import answer_guards, reference_gap, reference_logp, scorers_told
from training.rundir import RunDir, program

# -- the parts of a step -------------------------------------------------------------------------------------


def draw(count: int, wanted: int, seed: int, drawn: int) -> list[int]:
    """The next prompts of an endless sequence of epochs, each in an order of its own."""
    places = range(drawn, drawn + wanted)
    orders = {epoch: epoch_order(count, seed, epoch) for epoch in {place // count for place in places}}
    return [orders[place // count][place % count] for place in places]


def roll(
    setting: Setting, prompts: Sequence[Prompt], group: int, step: int, epochs: Sequence[int]
) -> Experience:
    """Answers of this rank's prompts, with scores; `epochs`: how often each prompt was drawn before, so that
    one that comes twice in a step (an epoch ends, DAPO draws again) gets other answers."""
    keys = [f"{row.id} {epoch}" if epoch else row.id for row, epoch in zip(prompts, epochs, strict=True)]
    encoded = [encode_prompt(setting.tok, prompt.prompt) for prompt in prompts]
    rollout = setting.generator.generate(
        encoded, group, max_new_tokens=setting.params.max_new_tokens, temperature=setting.params.temperature,
        keys=keys, seed=setting.run.seed, step=step,
    )  # fmt: skip
    setting.clock.lap("generate")
    found = gather(setting.tok, prompts, encoded, rollout, setting.scoring)
    setting.clock.lap("score")
    return found


def fixed_sampling(setting: Setting, state: dict[str, Any], step: int) -> Experience:
    """The step's prompts, as they come."""
    params, engine = setting.params, setting.engine
    count, drawn = len(setting.prompts), state["drawn"]
    chosen = draw(count, params.prompts, setting.run.seed, drawn)
    epochs = [place // count for place in range(drawn, drawn + params.prompts)]
    state["drawn"] += params.prompts
    mine = [setting.prompts[index] for index in chosen[engine.rank :: engine.world]]
    return roll(setting, mine, params.group, step, epochs[engine.rank :: engine.world])


def dynamic_sampling(setting: Setting, state: dict[str, Any], step: int) -> Experience:
    """DAPO: prompts whose answers all got the same reward are dropped and others drawn in their place, in at
    most `rounds` rounds [2503.14476]."""
    params, engine = setting.params, setting.engine
    quota = len(range(engine.rank, params.prompts, engine.world))
    kept: list[Experience] = []
    dropped: list[Experience] = []
    drawn: list[Scored] = []
    for _ in range(params.rounds):
        part = fixed_sampling(setting, state, step)
        drawn.append(part.scored)
        constant = advantages.constant_groups(
            part.grouped(part.scored.reward), part.grouped(part.scored.known)
        )
        alive = (~constant).nonzero()[:, 0].tolist()
        missing = quota - sum(len(other.trees) for other in kept)
        kept += [select(part, alive[:missing])] if alive[:missing] else []
        dropped += [select(part, constant.nonzero()[:, 0].tolist())] if bool(constant.any()) else []
        # All ranks go on together: under ZeRO-3 generation is a collective.
        if engine.sum([float(max(missing - len(alive), 0))])[0] == 0:
            break
    made = join(kept or dropped)
    # A group whose scorers fail or can't judge is dropped like one without any difference; the count is not.
    return replace(made, scored=made.scored._replace(**summed(drawn)))


SAMPLING = {"dapo": dynamic_sampling}


def signals(setting: Setting, found: Experience, beta: float) -> Signals:
    """Reference, KL and advantages of an experience."""
    params, width = setting.params, found.mask.shape[1]
    rolled = Rolled(found.trees, found.states)
    ref_logp = setting.learner.ref_logp(rolled, width)
    several = params.ppo.updates * params.ppo.minibatches > 1
    critic = params.algorithm == "ppo"
    if several or critic or params.clip.importance is not None:
        old_logp, *value = setting.learner.old(rolled, width)
    else:
        old_logp, value = found.rollout_logp, []
    log_ratios = kl.log_ratio(old_logp, ref_logp, found.mask)
    token_kl = kl.KL_ESTIMATORS[params.kl_estimator](log_ratios)
    weight = beta if params.kl_where == "reward" else 0.0
    made = Signals(found.mask, torch.zeros(0, 0), ref_logp, found.rollout_logp)
    if several or critic:
        made.old_logp = old_logp
    if params.algorithm == "online_dpo":
        return made
    if params.algorithm in advantages.ADVANTAGES:
        reward = kl.kl_in_score(found.scored.reward, token_kl, beta=weight)
        by_group = advantages.ADVANTAGES[params.algorithm](
            found.grouped(reward), found.grouped(found.scored.known)
        )
        made.advantage = by_group.advantage.flatten()[:, None]
        return made
    rewards = kl.kl_in_token_reward(found.scored.reward, token_kl, found.mask, beta=weight)
    if critic:
        made.old_value = value[0]
        raw = advantages.gae(rewards, value[0], found.mask, gamma=params.ppo.gamma, lam=params.ppo.lam)
        made.returns = raw.returns
    else:
        raw = advantages.discounted_returns(rewards, found.mask, gamma=params.ppo.gamma)
    summed = advantages.Moments(*setting.engine.sum(advantages.moments(raw.advantage, found.mask)))
    mean, std = advantages.mean_std(summed)
    made.advantage = advantages.whiten(raw.advantage, found.mask, mean=mean, std=std)
    return made


def update(setting: Setting, found: Experience, made: Signals, beta: float, step: int) -> dict[str, float]:
    """The optimizer steps on one rollout; ends early when the policy has moved `stop_kl` away."""
    params, count = setting.params, len(found.trees)
    policy = 0.0 if made.returns is not None and step <= params.ppo.value_warmup else 1.0
    parts: list[dict[str, float]] = []
    for number in range(params.ppo.updates):
        order = epoch_order(count, setting.run.seed, step * params.ppo.updates + number)
        for part in range(params.ppo.minibatches):
            chosen = sorted(order[part :: params.ppo.minibatches])
            info, values = setting.learner.update(
                Rolled(found.trees, found.states), made, chosen, beta, policy
            )
            parts.append({**values, "grad_norm": info.grad_norm, "lr": info.lr})
            if params.ppo.stop_kl is not None and values["approx_kl"] > params.ppo.stop_kl:
                break
        else:
            continue
        break
    wanted = ["loss", "ratio_clipped", "approx_kl", "grad_norm", "lr"]
    wanted += ["entropy_exact"] if params.entropy > 0 else []
    wanted += ["value_loss"] if made.returns is not None else []
    values = {name: sum(part[name] for part in parts) / len(parts) for name in wanted}
    # Of the first pass alone: later ones compare a policy that has moved.
    values |= {name: parts[0][name] for name in ("rollout_gap",) if name in parts[0]}
    return {**values, "updates": float(len(parts))}


def update_pairs(
    setting: Setting, found: Experience, made: Signals, beta: float, step: int
) -> dict[str, float]:
    """Online DPO: each prompt's best sample against its worst; equal ones teach nothing [2402.04792]."""
    picked = advantages.best_and_worst(found.grouped(found.scored.reward), found.grouped(found.scored.known))
    best, worst = picked.best.tolist(), picked.worst.tolist()
    pairs = [
        Tree(tree.key, tree.prompt, [tree.answers[b], tree.answers[w]])
        for tree, b, w in zip(found.trees, best, worst, strict=True)
    ]
    first = torch.arange(len(pairs)) * found.group
    rows = torch.stack([first + picked.best, first + picked.worst], 1).flatten()
    info, values = setting.learner.update_pairs(
        pairs, made.ref_logp[rows], made.rollout_logp[rows], picked.usable.float(), beta
    )
    return {**values, "grad_norm": info.grad_norm, "lr": info.lr, "updates": 1.0}


UPDATES = {"online_dpo": update_pairs}


def held_out_reward(setting: Setting) -> float | None:
    """Mean reward of one sample to each prompt that is set apart; the same random numbers every time, none of
    them training's. Never normalised: over the batch itself every policy's mean would be 0."""
    if not setting.held_out:
        return None
    own = setting.params.rewards.model_copy(update={"normalise": "none"})
    setting = replace(setting, scoring=replace(setting.scoring, params=own), clock=Clock())
    mine = setting.held_out[setting.engine.rank :: setting.engine.world] or setting.held_out[:1]
    found = roll(setting, mine, 1, step=-1, epochs=[0] * len(mine))
    counts = float(setting.engine.rank < len(setting.held_out))
    whole, n = setting.engine.sum(
        [counts * float(found.scored.reward.sum()), counts * float(found.scored.known.sum())]
    )
    return whole / n if n else None


def looks(params: OptimizeParams, step: int) -> bool:
    """Whether the held-out prompts are asked after a step: at the end, and at the first checkpoint after each
    `held_out_every` steps."""
    if step == params.steps:
        return True
    every, before = params.held_out_every, step - params.checkpoint_every
    return step > 0 and step % params.checkpoint_every == 0 and step // every > before // every


def look(setting: Setting, state: dict[str, Any], step: int) -> None:
    """Scores the checkpoint of a step by the held-out reward. It comes after the checkpoint, so that nothing
    that fails here costs one; a run that goes on from such a checkpoint therefore begins with it."""
    if not setting.held_out or not looks(setting.params, step):
        return
    with scorers_told(setting, step):
        state["held_out"][step] = held_out_reward(setting)
    setting.run.journal("held_out", step=step, reward=state["held_out"][step])
    setting.checkpoints.rate(step, state["held_out"][step])


# -- the program ---------------------------------------------------------------------------------------------


def step_once(setting: Setting, state: dict[str, Any], step: int) -> str | None:
    """One step; returns why the run ends here, if a guard ends it."""
    params, run, engine = setting.params, setting.run, setting.engine
    clock = setting.clock
    clock.start()
    setting.scoring.typical = guards.start(state["history"], "length")
    with scorers_told(setting, step):
        found = SAMPLING.get(params.algorithm, fixed_sampling)(setting, state, step)
    made = signals(setting, found, state["beta"])
    clock.lap("reference")
    judged = step == 1 or step % params.guards.gap_every == 0 or step == params.steps
    values = measure(found, made.ref_logp, engine.sum) | state["generator"]
    values["reference_gap"] = reference_gap(setting, state["canary"])
    if judged and setting.judge is not None:
        values |= second_opinion(found, setting.judge, engine.sum)
        clock.lap("judge")
    bad = not math.isfinite(values["reward"]) or not bool(made.advantage.isfinite().all())
    if engine.sum([float(bad)])[0]:
        values["loss"] = math.nan
    else:
        values |= UPDATES.get(params.algorithm, update)(setting, found, made, state["beta"], step)
    clock.lap("update")
    values["beta"] = state["beta"]
    state["history"].append(values)
    run.metrics(step, values)
    if params.kl.adaptive:
        state["beta"] = kl.adaptive_beta(
            state["beta"], values["kl"], target=params.kl.target, count=int(values["answers"]),
            horizon=float(params.kl.horizon),
        )  # fmt: skip
    healthy, reason = answer_guards(setting, state, step)
    run.progress(step, params.steps)
    seconds = sum(clock.seconds.values())
    new_tokens = values["answers"] * values["length"]
    stop = bool(engine.sum([float(run.stop_requested)])[0])
    if reason is None:
        if stop or step % params.checkpoint_every == 0 or step == params.steps:
            setting.checkpoints.save(step, state, healthy=healthy)
        clock.lap("checkpoint")
        # After the guards, whose rollback changes the weights too, and after the checkpoint, which a dead
        # generator must not cost.
        if not stop or step == params.steps:
            state["generator"] = setting.generator.update(step)
            clock.lap("weights")
            look(setting, state, step)
            clock.lap("held_out")
    run.timing(step, {"seconds": seconds, "new_tokens_per_second": new_tokens / seconds, **clock.seconds})
    if stop and reason is None and step < params.steps:
        raise Stopped(f"stopped after step {step} of {params.steps}; run again to go on from there")
    return reason


def begin(setting: Setting) -> tuple[int, dict[str, Any]]:
    """Goes on from the last checkpoint, or starts: preflight, held-out reward, a first checkpoint."""
    run, params = setting.run, setting.params
    resumed = setting.checkpoints.resume()
    generated = setting.generator.update(0 if resumed is None else resumed[0])
    trees = [Tree(row.id, encode_prompt(setting.tok, row.prompt), []) for row in setting.prompts[:2]]
    measured = preflight.policy(setting.learner, setting.generator, trees, run.seed, fresh=resumed is None)
    bound = preflight.SHARED_BOUND[resolve(params.precision)]
    # A run that goes on keeps the layout that it has: by now other weights are measured.
    layout = {name: measured.get(name, 0.0) <= bound for name in ("shared", "trunk")}
    layout = layout if resumed is None else resumed[1]["layout"]
    if not layout["shared"]:
        setting.learner.shared = False
    if not layout["trunk"]:
        setting.learner.trunk = None
        if isinstance(setting.generator, BuiltinGenerator):
            setting.generator.trunk = None
    if resumed is not None:
        state = {**resumed[1], "generator": generated}
        look(setting, state, resumed[0])
        return resumed[0], state
    run.journal(
        "start", prompts=len(setting.prompts), held_out=len(setting.held_out), steps=params.steps,
        precision=resolve(params.precision), shared_prompts=setting.learner.shared,
        kept_states=setting.learner.trunk is not None, preflight=measured,
        kl={"where": params.kl_where, "estimator": params.kl_estimator},
        reference=digest(run.input("model")), template_hash=template_hash(setting.tok),
        judge_guard=setting.judge is not None,
    )  # fmt: skip
    with scorers_told(setting, 0):
        before = held_out_reward(setting)
    state = {
        "drawn": 0, "beta": params.beta, "history": [], "answered": {}, "seen": [], "rollbacks": 0,
        "generator": generated, "canary": reference_logp(setting), "held_out": {0: before},
        "layout": layout,
    }  # fmt: skip
    setting.checkpoints.save(0, state, score=before)
    return 0, state


def main(run: RunDir) -> None:
    """Reads, trains, publishes."""
    setting = set_up(run)
    done, state = begin(setting)
    reason = None
    for step in range(done + 1, setting.params.steps + 1):
        reason = step_once(setting, state, step)
        if reason is not None:
            setting.checkpoints.rollback()
            break
    publish(setting, state, reason)


def publish(setting: Setting, state: dict[str, Any], reason: str | None) -> None:
    """Merged weights and the result; after a guard's stop the last healthy weights, marked as such."""
    run, params, engine = setting.run, setting.params, setting.engine
    seen = {step: reward for step, reward in state["held_out"].items() if reward is not None}
    best = max(seen, key=lambda step: (seen[step], step), default=None)
    folder = run.path / "model"
    weights = engine.full_state(setting.learner.model)
    for scorer in setting.scoring.scorers:
        scorer.close()
    if engine.first:
        merge_and_save(setting.learner.model, setting.tok, folder, saved_dtype(run.config), weights)
        history = state["history"]
        run.finish(
            {
                "status": "trained" if reason is None else "stopped_by_guard",
                "reason": reason,
                "digest": digest(folder),
                "template_hash": template_hash(setting.tok),
                "algorithm": params.algorithm,
                "steps": len(history),
                "reward_before": state["held_out"][0],
                "reward_after": seen.get(params.steps) if reason is None else None,
                "reward_best": None if best is None else {"step": best, "reward": seen[best]},
                "reward_first": _finite(history[0]["reward"]),
                "reward_last": _finite(history[-1]["reward"]),
                "kl": _finite(history[-1]["kl"]),
                "kl_target": params.kl.target,
                "guards": state["seen"],
            }
        )
    engine.barrier()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


if __name__ == "__main__":
    program(main)
