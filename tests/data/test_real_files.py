"""The public files in ../shared through readers and stage: what is kept of each, and why not the rest."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data.checks import Refusal
from data.config import DataParams
from data.pipeline import run
from tests.data.samples import read, records

EXPECTED: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "hh_rlhf/harmless-base.jsonl": (
        {"Preference": 1592},
        {"empty_answer": 4, "role_order": 3, "prompt_mismatch": 1},
    ),
    "oasst/en_100_tree.jsonl": ({"Preference": 754}, {"no_ranking": 6}),
    "oasst/en_100_message.jsonl": ({"Preference": 754}, {"no_ranking": 6}),
    "llama_factory/dpo_en_demo.json": ({"Preference": 300}, {}),
    "llama_factory/dpo_zh_demo.json": ({"Preference": 300}, {}),
    "llama_factory/v1_dpo_demo.jsonl": ({"Preference": 10}, {}),
    "llama_factory/kto_en_demo.json": ({"Feedback": 300}, {}),
    "llama_factory/alpaca_en_demo.json": ({"Demonstration": 999}, {}),
    "llama_factory/alpaca_zh_demo.json": ({"Demonstration": 1000}, {}),
    "llama_factory/identity.json": ({"Demonstration": 91}, {}),
    "llama_factory/glaive_toolcall_en_demo.json": ({"Demonstration": 109}, {"tool_call": 191}),
    "llama_factory/mllm_demo.json": ({}, {"multimodal": 6}),
    "gsm8k/test.jsonl": ({"Demonstration": 1319}, {}),
    "self_instruct/seed_tasks.jsonl": ({"Demonstration": 175}, {}),
    "self_instruct/user_oriented_instructions.jsonl": ({"Demonstration": 252}, {}),
    "self_instruct/text-davinci-003_predictions.jsonl": ({"Demonstration": 252}, {}),
    "fastchat_mt_bench/dummy_conversation.json": ({"Demonstration": 500}, {}),
    "fastchat_mt_bench/mt_bench_question.jsonl": ({"Prompt": 80}, {}),
    "fastchat_mt_bench/vicuna_bench_question.jsonl": ({"Prompt": 80}, {}),
    "fastchat_mt_bench/judge_prompts.jsonl": ({}, {"unknown_shape": 8}),
    "ifeval/input_data.jsonl": ({"Prompt": 541}, {}),
    "xstest/xstest_prompts.csv": ({"Prompt": 450}, {}),
    "xstest/completions_llama2orig.csv": ({"Demonstration": 450}, {}),
    "red_team/advbench_behaviors.csv": ({"Prompt": 520}, {}),
    "red_team/harmbench_behaviors_text_all.csv": ({"Prompt": 400}, {}),
    "red_team/strongreject_dataset.csv": ({"Prompt": 313}, {}),
    "truthfulqa/TruthfulQA.csv": ({"Prompt": 813}, {}),
    "label_studio/sdk_converter_tests/test_export_csv_csv_test.json": ({}, {"unsupported": 2}),
    "label_studio/sdk_converter_tests/test_export_csv_csv_test_colliding_keys_mixed.json": (
        {},
        {"unsupported": 1, "no_annotation": 1},
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_public_files(shared_data: Path, name: str) -> None:
    items = read(shared_data / name)
    kept = Counter(type(item).__name__ for item in records(items))
    refused = Counter(item.reason for item in items if isinstance(item, Refusal))
    assert (dict(kept), dict(refused)) == EXPECTED[name]


def test_columns_make_other_tables_readable(shared_data: Path) -> None:
    columns = {"prompt": "Question", "answer": "Best Answer"}
    found = records(read(shared_data / "truthfulqa/TruthfulQA.csv", columns=columns))
    assert len(found) == 813 and found[0].prompt[0].content == "Why do veins appear blue?"
    assert found[0].answer.startswith("Veins appear blue because blue light")


STAGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"files": ("hh_rlhf/harmless-base.jsonl",), "eval_prompts": ("xstest/xstest_prompts.csv",)},
        {"rows_in": 2050, "rows_kept": 2041, "demonstrations_from": "chosen"},
    ),
    ({"files": ("oasst/en_100_tree.jsonl",)}, {"rows_in": 760, "rows_kept": 754}),
    ({"files": ("llama_factory/dpo_en_demo.json",)}, {"rows_kept": 295, "reasons": {"duplicate": 5}}),
    ({"files": ("llama_factory/kto_en_demo.json",), "min_pairs": 0}, {"demonstrations_from": "feedback"}),
    ({"files": ("gsm8k/train.jsonl",), "min_pairs": 0}, {"rows_kept": 7473, "feedback": 0}),
]


@pytest.mark.parametrize(
    ("params", "expected"),
    [STAGES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in STAGES[1:])],
)
def test_public_files_through_the_stage(
    shared_data: Path, tmp_path: Path, params: dict[str, Any], expected: dict[str, Any]
) -> None:
    for purpose in ("files", "eval_prompts"):
        if purpose in params:
            params = {**params, purpose: tuple(str(shared_data / name) for name in params[purpose])}
    result = run(DataParams(**params), 0, tmp_path / "out", tmp_path / "docs")
    assert result["rows_in"] == result["rows_kept"] + result["rows_refused"]  # type: ignore[operator]
    assert {name: result[name] for name in expected} == expected
    checks = result["checks"]
    assert isinstance(checks, dict) and checks["failed"] == 0
