from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from data.errors import ConfigurationError, InfrastructureError
from data.records import Prompt, to_line
from tests.conftest import ROOT
from tests.training import fake_vllm
from tests.training.fake_vllm import Api
from tests.training.test_models import shaken
from tests.training.tiny import prompt, save_policy, workdir
from training import generate_vllm, rl, rl_setting
from training.batches import Tree, collate
from training.config_optimize import GeneratorParams, OptimizeParams
from training.engine import Engine
from training.generate import BuiltinGenerator, row_seed
from training.generate_vllm import BOUNDS, VllmGenerator, canaries_of, connect, require
from training.learner import Learner
from training.logprobs import AnswerLogprobs, answer_logprobs
from training.models import load_causal, load_policy, reference
from training.rundir import RunDir
from training.vllm_worker import Digest

STOP = 1
STOPS = [STOP, *range(40, 60)]
PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14, 15, 16, 17, 18], [20, 21, 22]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_policy(tmp_path / "model")


@pytest.fixture
def served(folder: Path) -> Iterator[tuple[str, Api]]:
    with fake_vllm.server(folder) as found:
        yield found


def learner(folder: Path, generator: dict[str, Any], **changes: Any) -> Learner:
    params = OptimizeParams.model_validate(
        {
            "precision": "fp32", "engine": {"backend": "torch"}, "lora": {"rank": 2}, "max_prompt": 20,
            "max_new_tokens": 12, "generator": {"kind": "vllm", **generator}, **changes,
        }
    )  # fmt: skip
    model = load_policy(folder, "fp32", params.lora)
    engine = Engine(
        AnswerLogprobs(model), params.engine, lr=1e-2, total_steps=4, warmup=0.0, min_lr_share=1.0,
        weight_decay=0.0, clip_norm=1.0,
    )  # fmt: skip
    return Learner(engine, model, reference(model), params, STOP, shared=True)


def on_server(model: Path, url: str, work: Path, **changes: Any) -> tuple[VllmGenerator, Learner]:
    trained = learner(model, {"mode": "server", "url": url, **changes})
    return connect(trained, STOPS, PROMPTS, model, work, 0), trained


def generate(generator: VllmGenerator, group: int = 3, **changes: Any) -> Any:
    settings = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3, "step": 2, **changes}
    return generator.generate(PROMPTS, group, keys=list("abcd"), **settings)


# -- what comes back -----------------------------------------------------------------------------------------


def check_rollout(made: Any, trained: Learner, temperature: float) -> None:
    """Answers belong to their prompts, their log-probabilities are the trainer's at the temperature."""
    trees = [Tree(key, ids, answers) for key, ids, answers in zip("abcd", PROMPTS, made.answers, strict=True)]
    logp, _ = answer_logprobs(trained.model, collate(trees, STOP, shared=True), temperature)
    rows = [row for samples in made.logp for row in samples]
    for row, ours in zip(rows, logp.tolist(), strict=True):
        assert row == pytest.approx(ours[: len(row)], abs=1e-4)
    for answers, ends in zip(made.answers, made.finished, strict=True):
        assert len({tuple(ids) for ids in answers}) > 1, "samples of a prompt differ"
        for ids, finished in zip(answers, ends, strict=True):
            assert [token in STOPS for token in ids] == [False] * (len(ids) - 1) + [finished]
            assert finished or len(ids) == 12
    assert made.states is None


def in_order(made: Any, engine: Any) -> bool:
    """Whether samples are where the engine's index says; the stand-in hands them out backwards."""
    for one in list(engine.asked):
        again = engine.sample(one["prompt"], one)
        if made.answers[PROMPTS.index(one["prompt"])] != [sample["token_ids"] for sample in again]:
            return False
    return True


def test_answers_of_a_server_are_in_order_with_the_trainers_logp(
    folder: Path, served: tuple[str, Api], tmp_path: Path
) -> None:
    url, api = served
    generator, trained = on_server(folder, url, tmp_path)
    shaken(trained.model)
    assert generator.update(7)["generator_gap"] < 1e-5
    made = generate(generator, temperature=0.7)
    check_rollout(made, trained, 0.7)
    assert {end for ends in made.finished for end in ends} == {True, False}, "both kinds were seen"
    asked = sorted(api.engine.asked, key=lambda one: PROMPTS.index(one["prompt"]))
    assert [one["prompt"] for one in asked] == PROMPTS, "a prompt is sent once for all its samples"
    assert [one["n"] for one in asked] == [3] * 4
    assert [one["seed"] for one in asked] == [row_seed(3, 2, key, 0) >> 2 for key in "abcd"]
    full = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
    assert all(one.items() >= full.items() for one in asked), "nothing reshapes the distribution"
    assert all(one["stop_token_ids"] == STOPS for one in asked)
    assert in_order(made, api.engine)
    # 62 bits and 3 samples more stay inside an int64.
    assert all(0 <= one["seed"] < 2**62 for one in asked)


def test_the_cache_of_older_weights_is_never_read(
    folder: Path, served: tuple[str, Api], tmp_path: Path
) -> None:
    url, api = served
    generator, trained = on_server(folder, url, tmp_path)
    salts = []
    for version in (1, 2):
        generator.update(version)
        generate(generator)
        salts.append({one["cache_salt"] for one in api.engine.asked})
        api.engine.asked.clear()
        shaken(trained.model)
    assert [len(each) for each in salts] == [1, 1] and salts[0] != salts[1]


def colocated(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> tuple[VllmGenerator, Learner, Any]:
    made: list[Any] = []
    monkeypatch.setitem(sys.modules, "vllm", fake_vllm.module(made))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "0")
    trained = learner(folder, {"mode": "colocated", **changes})
    return connect(trained, STOPS, PROMPTS, folder, folder / "work", 5), trained, made[0]


def test_an_engine_in_the_process_sleeps_while_the_trainer_works(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, trained, llm = colocated(folder, monkeypatch, memory_share=0.4)
    assert llm.asleep
    assert generator.update(1)["generator_gap"] < 1e-5
    assert llm.asleep
    made = generate(generator)
    check_rollout(made, trained, 1.0)
    assert in_order(made, llm.engine)
    assert llm.asleep and llm.calls == ["sleep 1", "wake"] * 2 + ["sleep 1"]
    settings = llm.settings
    assert settings["logprobs_mode"] == "processed_logprobs" and settings["generation_config"] == "vllm"
    assert settings["gpu_memory_utilization"] == 0.4 and settings["max_model_len"] == 32
    assert settings["dtype"] == "float32" and settings["seed"] == 5
    module, _, name = settings["worker_extension_cls"].rpartition(".")
    assert hasattr(sys.modules[module], name)


def test_without_sleep_it_stays_awake(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, _, llm = colocated(folder, monkeypatch, sleep=False)
    generator.update(1)
    generate(generator)
    assert llm.calls == [] and llm.settings["enable_sleep_mode"] is False


# -- the handshake -------------------------------------------------------------------------------------------


def test_a_restarted_server_is_found_before_its_answers_are_used(
    folder: Path, served: tuple[str, Api], tmp_path: Path
) -> None:
    url, api = served
    generator, trained = on_server(folder, url, tmp_path)
    shaken(trained.model)
    generator.update(1)
    generate(generator)
    api.restart()
    with pytest.raises(InfrastructureError, match=r"stale weights.*'version': None.*version 1"):
        generate(generator)
    generator.update(2)
    generate(generator)


def test_a_load_that_does_nothing_is_found(folder: Path, served: tuple[str, Api], tmp_path: Path) -> None:
    url, api = served
    generator, trained = on_server(folder, url, tmp_path, gap=1e9)
    generator.update(1)
    api.engine.worker.deaf = True
    shaken(trained.model)
    with pytest.raises(InfrastructureError, match=r"stale weights.*'version': 1.*version 2"):
        generator.update(2)


def test_a_second_trainer_on_the_same_server_is_found(
    folder: Path, served: tuple[str, Api], tmp_path: Path
) -> None:
    url, _ = served
    first, _ = on_server(folder, url, tmp_path / "a")
    second, other = on_server(folder, url, tmp_path / "b")
    shaken(other.model)
    first.update(1)
    second.update(1)
    with pytest.raises(InfrastructureError, match="stale weights"):
        generate(first)


def test_weights_changed_behind_its_back_are_found(
    folder: Path, served: tuple[str, Api], tmp_path: Path
) -> None:
    url, api = served
    generator, _ = on_server(folder, url, tmp_path)
    generator.update(1)
    with torch.no_grad():
        api.engine.worker.model_runner.model.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-3
    with pytest.raises(InfrastructureError, match=r"'intact': False"):
        generate(generator)


def test_an_update_without_change_is_a_version_of_its_own(
    folder: Path, served: tuple[str, Api], tmp_path: Path
) -> None:
    url, _ = served
    generator, _ = on_server(folder, url, tmp_path)
    assert [generator.update(version)["generator_gap"] < 1e-5 for version in (0, 1)] == [True, True]
    generate(generator)


def test_the_digest_sees_names_types_shapes_and_values() -> None:
    def of(**tensors: torch.Tensor) -> str:
        digest = Digest()
        assert dict(digest.watch(tensors.items())).keys() == tensors.keys()
        return digest.value()

    one, two = torch.ones(4, 2), torch.zeros(3)
    base = of(a=one, b=two)
    assert base == of(b=two, a=one), "order does not matter"
    assert len(base) == 12 and int(float(int(base, 16))) == int(base, 16), "exact in a float64"
    others = [
        of(a=one, c=two),
        of(a=one.bfloat16(), b=two),
        of(a=one.view(2, 4), b=two),
        of(a=one + 1e-7, b=two),
    ]
    assert len({base, *others}) == 5


def test_the_weights_pass_through_the_folder_and_leave_nothing(
    folder: Path, served: tuple[str, Api], tmp_path: Path
) -> None:
    url, api = served
    generator, trained = on_server(folder, url, tmp_path, folder=str(tmp_path / "shared"))
    generator.update(3)
    assert api.files == [str(tmp_path / "shared" / "weights-3.safetensors")]
    assert list((tmp_path / "shared").iterdir()) == []
    # A tied head goes once, and adapters are merged: as many tensors as the plain model has parameters.
    plain = sum(1 for name, _ in trained.model.named_parameters() if "lora_" not in name)
    assert api.engine.worker.loads == [plain]


# -- the canary ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [None, 0.02])
def test_another_kernel_is_found_by_the_canary(
    folder: Path, served: tuple[str, Api], tmp_path: Path, gap: float | None
) -> None:
    url, api = served
    generator, _ = on_server(folder, url, tmp_path, gap=gap)
    api.engine.skew = 0.9 * (gap or 1e-3)
    assert generator.update(1)["generator_gap"] == pytest.approx(api.engine.skew, abs=1e-5)
    api.engine.skew = 1.1 * (gap or 1e-3)
    # The first update is before the first step: running again would change nothing.
    with pytest.raises(InfrastructureError, match=r"generator_gap.*after step 2"):
        generator.update(2)
    with pytest.raises(ConfigurationError, match=r"generator_gap.*optimize\.generator\.gap"):
        on_server(folder, url, tmp_path, gap=gap)[0].update(1)


def test_canaries_are_prompts_cut_in_two() -> None:
    trees = canaries_of([[1], [2, 3, 4], [5, 6], [7, 8]], 2)
    assert [(tree.prompt, tree.answers) for tree in trees] == [([2], [[3, 4]]), ([5], [[6]])]
    with pytest.raises(ConfigurationError, match="no canary"):
        canaries_of([[1]], 2)


# -- what fails ----------------------------------------------------------------------------------------------


def test_a_dead_server_is_an_infrastructure_error(folder: Path, tmp_path: Path) -> None:
    with fake_vllm.server(folder) as (url, _):
        generator, _ = on_server(folder, url, tmp_path)
        generator.update(1)
    with pytest.raises(InfrastructureError, match=re.escape(url)):
        generate(generator)
    with pytest.raises(InfrastructureError, match="vllm serve"):
        require(GeneratorParams(kind="vllm", mode="server", url=url))


def test_the_time_limit_holds_for_all_prompts_together(
    folder: Path, served: tuple[str, Api], tmp_path: Path
) -> None:
    url, api = served
    generator, _ = on_server(folder, url, tmp_path, timeout=0.5, requests=1)
    generator.update(1)
    api.delay = 0.3
    begun = time.monotonic()
    with pytest.raises(InfrastructureError, match=r"no reply within 0\.5 s \(optimize\.generator\.timeout\)"):
        generate(generator, group=1)
    assert time.monotonic() - begun < 3.0


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        (401, ConfigurationError, "VLLM_API_KEY"),
        (404, ConfigurationError, "VLLM_SERVER_DEV_MODE=1"),
        (400, ConfigurationError, "--max-model-len"),
        (500, InfrastructureError, "it says no.*--worker-extension-cls"),
    ],
)
def test_a_refusal_says_what_to_do(
    folder: Path, served: tuple[str, Api], tmp_path: Path, status: int, kind: type[Exception], text: str
) -> None:
    url, api = served
    generator, _ = on_server(folder, url, tmp_path)
    api.statuses["/collective_rpc"] = status
    with pytest.raises(kind, match=text):
        generator.update(1)


def test_the_key_comes_from_the_environment(
    folder: Path, served: tuple[str, Api], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, api = served
    generator, _ = on_server(folder, url, tmp_path)
    monkeypatch.setenv("VLLM_API_KEY", "k")
    generator.update(1)
    assert api.keys == {"Bearer k"}


def test_an_answer_that_ended_otherwise_is_refused(
    folder: Path, served: tuple[str, Api], tmp_path: Path
) -> None:
    url, api = served
    generator, _ = on_server(folder, url, tmp_path)
    generator.update(1)
    api.engine.end = "abort"
    with pytest.raises(InfrastructureError, match="abort"):
        generate(generator)
    api.engine.end, api.bare = None, True
    with pytest.raises(InfrastructureError, match="token ids"):
        generate(generator)


# -- in a run ------------------------------------------------------------------------------------------------


def run_of(folder: Path, url: str, work: Path, steps: int) -> RunDir:
    rows = [Prompt(prompt=prompt(f"say {n}"), id=str(n), group=str(n)) for n in range(12)]
    (folder.parent / "prompts.jsonl").write_text("".join(map(to_line, rows)), encoding="utf-8")
    scorer = {"kind": "function", "name": "letters", "path": "tests.training.fake_vllm:letters"}
    params = {
        "steps": steps, "prompts": 4, "group": 3, "max_new_tokens": 6, "max_prompt": 64, "held_out": 2,
        "lr": 1e-2, "precision": "fp32", "lora": {"rank": 2, "layers": 1}, "engine": {"backend": "torch"},
        "clip": {"importance": 2.0}, "rewards": {"scorers": [scorer]}, "checkpoint_every": 1,
        "generator": {"kind": "vllm", "mode": "server", "url": url},
    }  # fmt: skip
    inputs = {"model": folder, "prompts": folder.parent / "prompts.jsonl"}
    return RunDir.open(workdir(work, "rl", params, inputs), 0)


def lines(run: RunDir, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / name).read_text().splitlines()]


@pytest.mark.slow
def test_a_run_generates_on_the_server_with_its_own_weights_even_after_a_rollback(
    folder: Path, served: tuple[str, Api], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, api = served
    run = run_of(folder, url, tmp_path / "run", steps=3)
    rolled: list[float] = []
    roll, answer_guards = rl.roll, rl.answer_guards

    def watched(setting: Any, *rest: Any, **named: Any) -> Any:
        rolled.append(setting.generator._gap())
        return roll(setting, *rest, **named)

    def at_step_two(setting: Any, state: Any, step: int) -> Any:
        if step == 2:
            setting.checkpoints.rollback()
        return answer_guards(setting, state, step)

    monkeypatch.setattr(rl, "roll", watched)
    monkeypatch.setattr(rl, "answer_guards", at_step_two)
    rl.main(run)
    # Held-out prompts before, three steps, held-out prompts after.
    assert len(rolled) == 5 and max(rolled) < 1e-5
    assert [Path(file).name for file in api.files] == [f"weights-{n}.safetensors" for n in range(4)]
    assert all(0 <= line["generator_gap"] < 1e-5 for line in lines(run, "metrics.jsonl"))
    published = load_causal(run.path / "model", torch.float32)
    served_model = api.engine.worker.model_runner.model
    assert all(
        torch.equal(a, b) for a, b in zip(published.parameters(), served_model.parameters(), strict=True)
    )


@pytest.mark.slow
def test_a_server_that_comes_back_empty_costs_one_step(
    folder: Path, served: tuple[str, Api], tmp_path: Path
) -> None:
    url, api = served
    run = run_of(folder, url, tmp_path / "run", steps=3)
    complete = api.engine.sample
    count = 0

    def dies(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 12:
            api.restart()
        return complete(*arguments)

    api.engine.sample = dies  # type: ignore[method-assign]
    with pytest.raises(InfrastructureError, match="stale weights"):
        rl.main(run)
    done = len(lines(run, "metrics.jsonl"))
    assert 0 < done < 3
    again = run_of(folder, url, tmp_path / "run", steps=3)
    rl.main(again)
    assert [line["step"] for line in lines(again, "metrics.jsonl")] == [1, 2, 3]
    assert Path(api.files[-1]).name == "weights-3.safetensors"
    resumed = [Path(file).name for file in api.files].count(f"weights-{done}.safetensors")
    assert resumed == 2, "the checkpoint's weights were handed over anew"


def test_a_run_asks_for_the_server_before_it_loads_anything(
    folder: Path, served: tuple[str, Api], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, api = served
    api.version = "0.19.0"
    monkeypatch.setattr(rl_setting, "load_policy", lambda *arguments: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigurationError, match=r"vLLM 0\.19\.0"):
        rl.main(run_of(folder, url, tmp_path / "run", steps=1))


# -- before any weight is loaded -----------------------------------------------------------------------------


def test_a_missing_vllm_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = GeneratorParams(kind="vllm")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="needs an accelerator"):
        require(chosen)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ConfigurationError, match=r"not installed; pip install 'vllm>="):
        require(chosen)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.26.9")
    with pytest.raises(ConfigurationError, match=r"vLLM 0\.26\.9 is outside of"):
        require(chosen)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.30.1.dev3+cu130")
    require(chosen)
    require(GeneratorParams())


def test_a_server_of_another_version_is_refused(served: tuple[str, Api]) -> None:
    url, api = served
    chosen = GeneratorParams(kind="vllm", mode="server", url=url + "/")
    require(chosen)
    api.version = "0.34.0"
    with pytest.raises(ConfigurationError, match=r"vLLM 0\.34\.0 is outside of"):
        require(chosen)


def test_the_bounds_are_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["vllm"] == [f"vllm{BOUNDS}"]


@pytest.mark.parametrize(
    ("generator", "text"),
    [
        ({"url": "http://h:1"}, "belong to kind: vllm"),
        ({"kind": "vllm", "folder": "x"}, "belong to kind: vllm"),
        ({"kind": "vllm", "mode": "server"}, "needs generator.url"),
        ({"kind": "vllm", "mode": "server", "url": "ftp://h"}, "needs generator.url"),
        ({"kind": "vllm", "mode": "server", "url": "http://u:p@h:1"}, "VLLM_API_KEY"),
        ({"kind": "vllm", "mode": "server", "url": "http://:p@h:1"}, "VLLM_API_KEY"),
    ],
)
def test_an_impossible_combination_is_refused(generator: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        OptimizeParams.model_validate({"generator": generator})


def test_sharded_weights_can_not_go_to_an_engine_in_the_process() -> None:
    changes = {"engine": {"zero": 3}, "generator": {"kind": "vllm"}}
    with pytest.raises(ValueError, match=r"set generator\.mode: server"):
        OptimizeParams.model_validate(changes)


def test_the_built_in_generator_measures_nothing(folder: Path) -> None:
    model = load_policy(folder, "fp32", None)
    assert BuiltinGenerator(model, [STOP], STOP).update(4) == {}
    assert generate_vllm.GAP["bf16"] > generate_vllm.GAP["fp32"]
