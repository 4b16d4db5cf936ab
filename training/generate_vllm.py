"""vLLM behind the generator's interface, with what can go wrong unseen made to be seen.

Handshake: after each update, and after each call that generated, every worker says which weights it has (step
and a digest that the worker takes of what it loaded); anything but the trainer's own is an error. A server
that was restarted, woken without its weights or fed by another run shows here.

Canary: after each update a few fixed texts are scored by both sides; the mean |logp difference| a token is a
metric (`generator_gap`), and beyond its bound an error. Another precision, kernel or layer that is computed
otherwise shows here; so does a load that did nothing.

What is left below the bound is corrected by truncated importance sampling: set optimize.clip.importance (2
is usual), which also needs the policy's own log-probabilities and so one more forward pass a step. Sampling
is not bit-reproducible: two runs with vLLM do not have equal digests.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor

from data.errors import ConfigurationError, InfrastructureError
from training.batches import Batch, Tree
from training.config_optimize import GeneratorParams, OptimizeParams
from training.device import resolve
from training.generate import Rollout, prompt_key, row_seed
from training.learner import Learner, Rolled
from training.models import merged_items
from training.vllm_link import SERVE, Asked, Colocated, Link, Server
from training.vllm_worker import Digest

BOUNDS = ">=0.27,<0.34"
"""Versions of vLLM, as in pyproject's extra: what this was written against. torch decides which of them can
live in the trainer's own environment; a server has its own."""
INSTALL = (
    f"pip install 'vllm{BOUNDS}' torch==2.13.0 'transformers>=5.24' && pip install -c constraints.txt -e ."
)
"""In two steps: vLLM's bound on fastapi, which only its server needs, excludes that of the flow's Prefect."""
GAP = {"fp32": 1e-3, "bf16": 0.05}
"""Default bound of the mean |logp difference| a token; bfloat16 keeps 3 digits, and kernels sum otherwise."""
WIRE = {"fp32": torch.float32, "bf16": torch.bfloat16}
CANARY_TOKENS = 256


def require(params: GeneratorParams) -> None:
    """Whether vLLM is there in a version that fits: asked before any weight is loaded."""
    if params.kind != "vllm":
        return
    if params.mode == "server":
        _fits(Server(params.url, Path(), params.timeout, 1).version(), params.url)
        return
    if not torch.accelerator.is_available():
        raise ConfigurationError(
            "optimize.generator.mode: colocated needs an accelerator, there is none here; set kind: builtin, "
            "or mode: server with a url"
        )
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigurationError(
            f"optimize.generator.kind: vllm, but vLLM is not installed; {INSTALL}, or set mode: server"
        ) from None
    _fits(version, "this environment")


def _fits(version: str, where: str) -> None:
    if not SpecifierSet(BOUNDS).contains(version, prereleases=True):
        raise ConfigurationError(
            f"{where}: vLLM {version} is outside of {BOUNDS}, which this was written for; install one "
            "inside, or set optimize.generator.kind: builtin"
        )


def connect(
    learner: Learner, stops: Sequence[int], prompts: Sequence[list[int]], source: Path, work: Path, seed: int
) -> VllmGenerator:
    """The generator that `params.generator` describes. `source`: the model's folder; `work`: the run's own;
    `prompts`: the first ones become canaries."""
    params, chosen = learner.params, learner.params.generator
    precision = resolve(params.precision)
    link: Link
    if chosen.mode == "server":
        folder = Path(chosen.folder) if chosen.folder else work / "generator"
        link = Server(chosen.url, folder, chosen.timeout, chosen.requests)
    else:
        link = Colocated(
            source, dtype=WIRE[precision], max_length=params.max_prompt + params.max_new_tokens,
            memory_share=chosen.memory_share, sleep=chosen.sleep, seed=seed,
        )  # fmt: skip
    return VllmGenerator(link, learner, stops, canaries_of(prompts, chosen.canaries))


def canaries_of(prompts: Sequence[list[int]], count: int) -> list[Tree]:
    """Fixed texts: the first prompts that can be cut in two, their second half as the answer."""
    usable = [prompt[:CANARY_TOKENS] for prompt in prompts if len(prompt) >= 2][:count]
    if not usable:
        raise ConfigurationError("optimize.generator: no prompt has two tokens, so no canary can be scored")
    return [Tree(prompt_key(ids), ids[: len(ids) // 2], [ids[len(ids) // 2 :]]) for ids in usable]


class VllmGenerator:
    """Generates elsewhere, with weights that are proven to be the trainer's."""

    def __init__(self, link: Link, learner: Learner, stops: Sequence[int], canaries: Sequence[Tree]) -> None:
        """Nothing may be generated before the first `update`."""
        params: OptimizeParams = learner.params
        precision = resolve(params.precision)
        self._link, self._learner, self._stops = link, learner, sorted(set(stops))
        self._canaries = list(canaries)
        self._bound = GAP[precision] if params.generator.gap is None else params.generator.gap
        self._dtype = WIRE[precision]
        self._expected: tuple[int, str] | None = None

    def update(self, version: int) -> dict[str, float]:
        """Hands the policy's weights over; raises where the other side has others, or computes otherwise."""
        first = self._expected is None
        engine, link = self._learner.engine, self._link
        state = engine.full_state(self._learner.model)
        digest = Digest()
        if not link.once or engine.first:
            link.load(digest.watch(self._weights(state)), version)
        value = digest.value()
        if link.once:
            # Rank 0's digest for all ranks: 48 bits pass through a float64 sum unharmed.
            (whole,) = engine.sum([float(int(value, 16)) if engine.first else 0.0])
            value = f"{int(whole):012x}"
        self._expected = (version, value)
        self._handshake()
        gap = self._gap()
        link.rest()
        if not gap <= self._bound:
            text = (
                f"generator_gap: vLLM's log-probabilities differ from the trainer's by {gap:.3g} a token on "
                f"average (bound {self._bound:g}, optimize.generator.gap) after step {version}, although the "
                "weights are the same; start vLLM with the trainer's precision (--dtype), without "
                "quantisation, or raise the bound and set optimize.clip.importance"
            )
            raise ConfigurationError(text) if first else InfrastructureError(text)
        return {"generator_gap": gap}

    def _weights(self, state: dict[str, Tensor] | None) -> Iterator[tuple[str, Tensor]]:
        # Parameters by name hold a tied head once, as vLLM wants it.
        tensors = dict(self._learner.model.named_parameters()) if state is None else state
        for name, tensor in merged_items(self._learner.model, tensors):
            yield name, tensor.detach().to(self._dtype)

    def _handshake(self) -> None:
        assert self._expected is not None, "update comes before generate"
        version, digest = self._expected
        reports = self._link.reports()
        wrong = [
            report for report in reports
            if (report["version"], report["digest"]) != (version, digest) or not report["intact"]
        ]  # fmt: skip
        if wrong or not reports:
            raise InfrastructureError(
                f"stale weights: {len(wrong)} of {len(reports)} of vLLM's workers report {wrong[:1]}, the "
                f"trainer is at version {version}, digest {digest}: the server was restarted, another run "
                "loads weights into it, or the load had no effect. Nothing of this step was used; running "
                f"again goes on from the last checkpoint. A server must be started so: {SERVE}"
            )

    def _gap(self) -> float:
        trees = self._canaries
        width = max(len(tree.answers[0]) for tree in trees)
        engine = self._learner.engine

        def at_one(batch: Batch) -> list[Tensor]:
            return [engine.module(batch, 1.0)[0]]

        ours = self._learner.read(Rolled(trees), width, at_one)[0]
        salt = self._salt()
        theirs = self._link.score([tree.prompt + tree.answers[0] for tree in trees], salt)
        gaps: list[float] = [
            abs(mine - its)
            for row, tree, line in zip(ours.tolist(), trees, theirs, strict=True)
            for mine, its in zip(row, line[len(tree.prompt) - 1 :], strict=False)
        ]
        return sum(gaps) / len(gaps)

    def _salt(self) -> str:
        assert self._expected is not None, "update comes before generate"
        return f"plumbline-{self._expected[0]}-{self._expected[1]}"

    def generate(
        self,
        prompts: Sequence[list[int]],
        group: int,
        *,
        max_new_tokens: int,
        temperature: float,
        keys: Sequence[str] | None = None,
        seed: int = 0,
        step: int = 0,
    ) -> Rollout:
        """See `Generator`; random numbers are vLLM's own, from a seed a prompt."""
        assert prompts and group >= 1 and max_new_tokens >= 1 and temperature > 0 and all(prompts)
        keys = [prompt_key(prompt) for prompt in prompts] if keys is None else keys
        # 62 bits: vLLM counts on from the seed, a sample each, in an int64.
        asked = [
            Asked(
                list(prompt), group, row_seed(seed, step, key, 0) >> 2, temperature, max_new_tokens,
                self._stops, self._salt(),
            )
            for prompt, key in zip(prompts, keys, strict=True)
        ]  # fmt: skip
        answers = self._link.complete(asked)
        self._handshake()
        self._link.rest()
        rollout = Rollout()
        for samples in answers:
            ends = [bool(sample.ids) and sample.ids[-1] in self._stops for sample in samples]
            for sample, ended in zip(samples, ends, strict=True):
                whole = len(sample.ids) == max_new_tokens
                if sample.reason not in ("stop", "length") or not (ended or whole):
                    raise InfrastructureError(
                        f"vLLM ended an answer of {len(sample.ids)} tokens ({sample.reason}) at neither an "
                        f"end of turn {self._stops} nor max_new_tokens ({max_new_tokens}); raise its "
                        "--max-model-len, and start it without stop tokens of its own"
                    )
            rollout.answers.append([sample.ids for sample in samples])
            rollout.logp.append([sample.logp for sample in samples])
            rollout.finished.append(ends)
        if [len(samples) for samples in answers] != [group] * len(prompts):
            raise InfrastructureError(f"vLLM gave other than {group} answers to a prompt")
        return rollout
