"""params.yaml: faults are named with key, value, bound and remedy; overrides are written in place."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from data.errors import ConfigurationError
from tasks.overrides import merged, write_overrides
from tasks.params import FILE, Params, flat, load, parse, read_raw
from tests.conftest import ROOT


def test_the_shipped_file_is_valid_and_names_every_section() -> None:
    raw = read_raw(ROOT / FILE)
    assert set(raw) == set(Params.model_fields)
    load(ROOT)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (
            {"sft": {"lr": -1.0}},
            ("sft.lr = -1.0", "greater than 0", "change the value of sft.lr", "learning rate"),
        ),
        ({"sft": {"learning_rate": 1.0}}, ("sft.learning_rate", "no such parameter", "known here", "lr")),
        ({"optimize": {"guard": {}}}, ("optimize.guard", "did you mean 'guards'?")),
        ({"optimise": {}}, ("optimise", "did you mean 'optimize'?")),
        ({"sft": {"lora": {"ranks": 3}}}, ("sft.lora.ranks", "did you mean 'rank'?")),
        ({"sft": {"epochs": "2"}}, ("sft.epochs = '2'", "whole number")),
        ({"seed": True}, ("seed = True", "whole number")),
        (
            {"sft": {"max_prompt": 900}},
            ("sft: max_prompt (900) must be below max_length", "lower max_prompt"),
        ),
        ({"model": {"dtype": "int4"}}, ("model.dtype = 'int4'", "bfloat16")),
        ({"registry": {"name": "a b"}}, ("registry.name = 'a b'",)),
        ({"judge": {"model": "policy", "process": {}}}, ("judge: process is for reward", "to null")),
        ({"reward": {"process": {}}}, ("reward: process with model: minilm", "set model: policy")),
    ],
)
def test_a_fault_names_file_key_value_bound_and_remedy(
    raw: dict[str, object], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(raw, "params.yaml")
    message = str(caught.value)
    assert message.startswith("params.yaml: ")
    for word in words:
        assert word in message


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse({"sft": {"lr": 0, "epochs": 0}, "nonsense": 1}, "params.yaml")
    assert len(str(caught.value).splitlines()) == 3


def test_numbers_are_read_as_dvc_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    file.write_text("a: 1e-5\nb: on\nc: 0o10\n", encoding="utf-8")
    assert read_raw(file) == {"a": 1e-5, "b": "on", "c": 8}


def test_a_file_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("a: [1,", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"params\.yaml, line 1: not valid YAML"):
        load(tmp_path)
    (tmp_path / FILE).unlink()
    with pytest.raises(ConfigurationError, match="missing"):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"model: [", b"seed: 1\nseed: 2\n", b"- 1\n", b"seed: 0 # \xe9\n"])
def test_a_faulty_file_is_named_before_anything_is_written(project: Path, content: bytes) -> None:
    (project / FILE).write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"params\.yaml(, line \d+)?: "):
        write_overrides(project, ["seed=1"])
    assert (project / FILE).read_bytes() == content


def test_overrides_are_written_and_comments_survive(project: Path) -> None:
    changed = write_overrides(project, ["sft.lr=1e-5", "sft.lora=null", "optimize.kl.target=0.3", "seed=0"])
    assert changed == ["sft.lr", "sft.lora", "optimize.kl.target"]
    text = (project / FILE).read_text(encoding="utf-8")
    assert "# comments survive" in text
    assert "# peak" in text
    params = load(project)
    assert (params.sft.lr, params.sft.lora, params.optimize.kl.target) == (1e-5, None, 0.3)
    assert write_overrides(project, ["sft.lr=1e-5"]) == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sft.lr=0", "override: sft.lr = 0"),
        ("sft.lrr=1", "did you mean 'lr'"),
        ("seed", "expected key.sub=value"),
        ("seed.x=1", "seed is a single value"),
        ("sft.lr=[1", "not valid YAML"),
    ],
)
def test_a_wrong_override_leaves_the_file_as_it_was(project: Path, override: str, words: str) -> None:
    before = (project / FILE).read_bytes()
    with pytest.raises(ConfigurationError, match=words.replace("[", r"\[")):
        write_overrides(project, ["seed=7", override])
    assert (project / FILE).read_bytes() == before


def test_a_profile_is_whole_and_overrides_win(project: Path) -> None:
    """What params.yaml had before and the profile does not name is a default again."""
    (project / "profiles").mkdir()
    (project / "profiles" / "base.yaml").write_text(
        "sft: {batch: 32, lora: {rank: 64}}\noptimize: {prompts: 5}\n", encoding="utf-8"
    )
    (project / "profiles" / "big.yaml").write_text(
        "extends: base\nsft: {batch: 64}\noptimize: {steps: 900}\n", encoding="utf-8"
    )
    write_overrides(project, ["sft.lr=7e-3", "sft.lora=null", "reward.epochs=9"])
    changed = write_overrides(project, ["optimize.steps=10"], profile="big")
    assert {"sft.lr", "sft.batch", "sft.lora", "optimize.prompts", "reward"} <= {
        ".".join(key.split(".")[:2]) if not key.startswith("reward") else "reward" for key in changed
    }
    params = load(project)
    assert params.sft.lora is not None
    assert (params.sft.batch, params.sft.lora.rank, params.optimize.prompts) == (64, 64, 5)
    assert (params.sft.lr, params.reward.epochs) == (Params().sft.lr, Params().reward.epochs)
    assert params.optimize.steps == 10
    with pytest.raises(ConfigurationError, match="known: base, big"):
        write_overrides(project, profile="bigger")


def test_profiles_that_extend_each_other_are_refused(project: Path) -> None:
    (project / "profiles").mkdir()
    for name, other in (("one", "two"), ("two", "one")):
        (project / "profiles" / f"{name}.yaml").write_text(f"extends: {other}\n", encoding="utf-8")
    before = (project / FILE).read_bytes()
    with pytest.raises(ConfigurationError, match="a circle"):
        write_overrides(project, profile="one")
    assert (project / FILE).read_bytes() == before


def test_writers_wait_for_each_other(project: Path) -> None:
    keys = ["seed", "sft.batch", "sft.epochs", "optimize.steps", "optimize.prompts", "evaluate.kl_prompts"]
    writers = [threading.Thread(target=write_overrides, args=(project, [f"{key}=9"])) for key in keys]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    params = load(project)
    assert (params.seed, params.sft.batch, params.optimize.prompts, params.evaluate.kl_prompts) == (
        9,
        9,
        9,
        9,
    )


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"evaluate": {"prompts": 50}}, "evaluate.prompts: 50 is below promote.min_prompts (100)"),
        (
            {"evaluate": {"kl_prompts": 0}},
            "evaluate.kl_prompts: 0 leaves promote.max_kl without a measurement",
        ),
        ({"promote": {"min_win_rate_lower": 1.0}}, "promote.min_win_rate_lower = 1.0"),
        ({"promote": {"min_length_controlled": 1.0}}, "promote.min_length_controlled = 1.0"),
        (
            {"optimize": {"rewards": {"weights": {"quality": 0.0, "safety": 1.0}}}},
            "optimize.rewards.weights of ['quality'] are all 0",
        ),
        ({"reward": {"heads": ["style"]}}, "optimize.rewards.weights has no weight for ['style']"),
        (
            {
                "reward": {"heads": ["safety", "factuality"]},
                "optimize": {"rewards": {"scorers": [{"kind": "learned", "name": "r", "floor": 0.0}]}},
            },
            "r: its floor is on dimension 'quality', which is none of reward.heads (safety, factuality)",
        ),
        ({"data": {"splits": {"judge": 0.0, "train": 0.75}}}, "data.splits.judge: 0 leaves the judge stage"),
        ({"data": {"splits": {"validation": 0.0, "train": 0.57}}}, "leaves the reward stage without pairs"),
    ],
)
def test_what_could_never_end_well_is_refused(section: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)) as caught:
        parse(section, "params.yaml")
    assert "params.yaml: :" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "seed: 1\nsft: {lr: 1.0e-5}\nseed: 2\n",
            'params.yaml, line 3: duplicate key "seed"; a key stands once',
        ),
        ("data: {files: 5}\n", "data.files = 5: expected a list"),
        ("promote: 3\n", "promote = 3: expected a section"),
        ("seed: x\n", "seed = 'x': expected a whole number"),
    ],
)
def test_faults_are_told_in_the_words_of_who_writes_yaml(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        load(tmp_path)


def test_flat() -> None:
    assert flat({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}


def test_merged_changes_neither() -> None:
    base = {"a": {"b": 1, "c": 2}, "d": 3}
    assert merged(base, {"a": {"b": 9}, "e": 4}) == {"a": {"b": 9, "c": 2}, "d": 3, "e": 4}
    assert base == {"a": {"b": 1, "c": 2}, "d": 3}
