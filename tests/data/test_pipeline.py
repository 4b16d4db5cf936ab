"""The whole stage: counts that add up, parts that do not meet, equal bytes, refusals that explain.

Great Expectations costs about a second a run, so that most tests here leave it out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data import pipeline
from data.config import PARTS, DataParams
from data.emit import PAIRS, RECORD_FILES, STEPS
from data.errors import DataError
from data.expectations import Check
from data.pipeline import OUTPUTS, run
from data.records import Demonstration, Feedback, Preference, Prompt, StepLabels, read_records
from tests.conftest import ROOT
from tests.data.samples import Row, pair, pairs, write_jsonl


class Project:
    """A project folder with sources, and runs of the stage in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out, self.docs = folder / "out", folder / "docs"

    def file(self, name: str, rows: list[Row]) -> str:
        return write_jsonl(self.folder / name, rows).name

    def run(self, *files: str, seed: int = 0, **params: Any) -> dict[str, Any]:
        params.setdefault("min_pairs", 1)
        result = run(DataParams(files=files, **params), seed, self.out, self.docs)
        assert result["rows_in"] == result["rows_kept"] + result["rows_refused"]
        assert result["rows_refused"] == sum(result["reasons"].values()) == len(self.quarantine())
        return result

    def quarantine(self) -> list[Row]:
        return [json.loads(line) for line in (self.out / "quarantine.jsonl").read_text("utf-8").splitlines()]

    def pairs(self, part: str) -> list[Preference]:
        return list(read_records(self.out / f"pairs_{part}.jsonl", Preference))

    def demonstrations(self) -> list[Demonstration]:
        return list(read_records(self.out / "demonstrations.jsonl", Demonstration))

    def prompts(self, name: str) -> list[Prompt]:
        return list(read_records(self.out / f"prompts_{name}.jsonl", Prompt))


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project whose runs evaluate the suites."""
    monkeypatch.chdir(tmp_path)
    return Project(tmp_path)


@pytest.fixture
def project(checked: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project whose runs leave the suites out."""
    passed = Check("pairs", "left out", "", "", True, "", "", "")
    monkeypatch.setattr(pipeline, "check_files", lambda out, params: [passed])
    return checked


def _asked(prompt: Any) -> str:
    return str(prompt.prompt[-1].content)


# What is written


def test_every_row_is_kept_or_refused_with_a_reason(checked: Project) -> None:
    project = checked
    good = pairs(40, each=2)
    bad: list[Row] = [
        {**pair("a?"), "rejected": "Air scatters blue light most."},
        {"messages": [{"role": "user", "content": "x"}]},
        {"instruction": "Is 7 prime?", "output": True},
    ]
    source = project.file("rows.jsonl", [*good, *bad, good[0]])
    result = project.run(source)
    assert (result["rows_in"], result["rows_kept"]) == (84, 80)
    assert result["reasons"] == {"duplicate": 1, "identical": 1, "last_turn": 1, "not_text": 1}
    assert sum(result["pairs"].values()) == 80
    refused = {row["line"]: (row["reason"], row["file"], row["field"]) for row in project.quarantine()}
    assert refused[81] == ("identical", "rows.jsonl", "rejected")
    assert refused[83] == ("not_text", "rows.jsonl", "output")
    assert result["files"]["rows.jsonl"]["rows_refused"] == 4
    assert result["checks"]["evaluated"] > 20 and result["checks"]["failed"] == 0


def test_the_output_is_the_same_bytes_again_and_names_no_place_or_time(project: Project) -> None:
    source = project.file("rows.jsonl", pairs(40, each=2))
    first = project.run(source)
    before = {name: (project.out / name).read_bytes() for name in OUTPUTS}
    assert project.run(source) == first
    assert {name: (project.out / name).read_bytes() for name in OUTPUTS} == before
    assert sorted(path.name for path in project.out.iterdir()) == sorted(OUTPUTS)
    for text in (*before.values(), json.dumps(first).encode()):
        assert str(project.folder).encode() not in text
    assert project.run(str(project.folder / source)) == first


def test_no_prompt_group_is_in_two_parts(project: Project) -> None:  # F20
    rows = pairs(170, each=5)
    for number, row in enumerate(rows):
        if number % 3 == 0:
            row["prompt"] = row["prompt"].upper() + " "
    result = project.run(project.file("rows.jsonl", rows))
    groups = {part: {item.group for item in project.pairs(part)} for part in PARTS}
    assert sum(len(found) for found in groups.values()) == len(set().union(*groups.values())) == 170
    assert all(result["pairs"][part] >= 100 for part in PARTS)
    learned = {item.group for item in (*project.demonstrations(), *project.prompts("train"))}
    assert learned == groups["train"]
    assert {item.group for item in project.prompts("eval")} == groups["test"]


def test_grown_conversations_stay_with_their_opening(project: Project) -> None:  # F20
    rows = []
    for row in pairs(40):
        opening = [{"role": "user", "content": row["prompt"]}]
        grown = [
            *opening,
            {"role": "assistant", "content": row["chosen"]},
            {"role": "user", "content": "More?"},
        ]
        rows += [row, {**row, "prompt": grown}]
    project.run(project.file("rows.jsonl", rows))
    for part in PARTS:
        sizes = Counter(item.group for item in project.pairs(part))
        assert set(sizes.values()) == {2}


def test_evaluation_prompts_that_meet_a_pair_are_dropped_with_the_reason(project: Project) -> None:  # F20
    rows = pairs(40)
    asked = [
        {"prompt": rows[5]["prompt"].lower(), "slice": "how_to"},
        {"prompt": "Something else?", "slice": "advice"},
        {"prompt": "And another thing?"},
    ]
    result = project.run(project.file("rows.jsonl", rows), eval_prompts=(project.file("eval.jsonl", asked),))
    assert [(item.slice, _asked(item)) for item in project.prompts("eval")] == [
        ("advice", "Something else?"),
        ("all", "And another thing?"),
    ]
    (refused,) = project.quarantine()
    assert (refused["file"], refused["line"], refused["reason"]) == ("eval.jsonl", 1, "overlap")
    assert result["slices"] == {"advice": 1, "all": 1}


def test_an_evaluation_of_nothing_is_an_error(checked: Project) -> None:
    project = checked
    rows = pairs(20)
    asked = project.file("eval.jsonl", [{"prompt": rows[5]["prompt"]}])
    with pytest.raises(DataError, match="none of 1 prompt groups is left"):
        project.run(project.file("rows.jsonl", rows), eval_prompts=(asked,))


def test_extra_prompts_join_unless_they_are_held_out(project: Project) -> None:
    rows = pairs(40)
    source = project.file("rows.jsonl", rows)
    project.run(source)
    train, held_out = _asked(project.pairs("train")[0]), _asked(project.pairs("judge")[0])
    extra = [
        {"question": "2 + 3?", "answer": "It is\n#### 5"},
        {"prompt": held_out},
        {"prompt": train, "level": "easy"},
        {"prompt": "For evaluation?"},
    ]
    result = project.run(
        source,
        prompts=(project.file("extra.jsonl", extra),),
        eval_prompts=(project.file("eval.jsonl", [{"prompt": "for evaluation"}, {"prompt": "Else?"}]),),
    )
    found = {_asked(item): item for item in project.prompts("train")}
    assert found["2 + 3?"].reference == "5"
    assert found[train].extra == {"level": "easy"}
    assert held_out not in found and "For evaluation?" not in found
    assert len(found) == result["pairs"]["train"] + 1
    assert [(row["line"], row["reason"]) for row in project.quarantine()] == [(2, "overlap"), (4, "overlap")]


def test_demonstrations_are_the_best_chosen_answer_of_each_train_prompt(project: Project) -> None:
    rows: list[Row] = []
    for number in range(40):
        base = {"prompt": f"Question {number}?"}
        rows += [
            {**base, "chosen": "fair", "rejected": "poor"},
            {**base, "chosen": "good", "rejected": "poor"},
            {**base, "chosen": "best", "rejected": "fair", "votes": [3, 0]},
            {**base, "chosen": "best", "rejected": "poor"},
        ]
    source = project.file("rows.jsonl", rows)
    result = project.run(source)
    assert result["demonstrations_from"] == "chosen"
    assert {item.answer for item in project.demonstrations()} == {"best"}
    assert len(project.demonstrations()) == result["prompts"]["train"]
    project.run(source, demonstrations_per_prompt=0)
    # "fair" lost 3 votes and won 1: no answer to imitate.
    assert {item.answer for item in project.demonstrations()} == {"best", "good"}


def test_given_demonstrations_come_before_chosen_answers(project: Project) -> None:
    rows = pairs(40)
    source = project.file("rows.jsonl", rows)
    project.run(source)
    held_out = _asked(project.pairs("test")[0])
    given = [{"instruction": "Sing.", "output": "La."}, {"instruction": held_out, "output": "Leak."}]
    result = project.run(source, project.file("demos.jsonl", given))
    assert [item.answer for item in project.demonstrations()] == ["La."]
    assert result["demonstrations_from"] == "demonstrations"
    assert result["reasons"] == {"overlap": 1}


def test_feedback_alone_gives_demonstrations_prompts_and_an_evaluation(project: Project) -> None:
    rows = [
        {"prompt": f"Question {n}?", "completion": f"Answer {n}.", "label": n % 2 == 0} for n in range(80)
    ]
    result = project.run(project.file("kto.jsonl", rows), min_pairs=0)
    feedback = list(read_records(project.out / "feedback.jsonl", Feedback))
    assert len(feedback) == result["feedback"] == len(project.prompts("train"))
    assert len(project.demonstrations()) == sum(row.label for row in feedback)
    evaluation = {item.group for item in project.prompts("eval")}
    assert len(evaluation) + len(feedback) == 80
    assert not evaluation & {row.group for row in feedback}


def _steps(prompts: list[str]) -> list[Row]:
    return [{"prompt": prompt, "steps": [f"One of {prompt}", "Two."], "labels": [1, 0]} for prompt in prompts]


def test_labelled_steps_go_to_train_and_validation_by_prompt_group(project: Project) -> None:
    given = _steps([f"Sum {n}?" for n in range(80)])
    result = project.run(project.file("rows.jsonl", pairs(40)), project.file("steps.jsonl", given))
    kept = {part: list(read_records(project.out / name, StepLabels)) for part, name in STEPS.items()}
    counts = {part: len(rows) for part, rows in kept.items()}
    assert result["step_labels"] == counts and sum(counts.values()) == 80
    assert 6 <= counts["validation"] <= 30, "the shares are .45 and .12"
    groups = {part: {row.group for row in rows} for part, rows in kept.items()}
    assert not groups["train"] & groups["validation"]
    rollouts = {prompt.group for prompt in project.prompts("train")}
    assert groups["train"] < rollouts and not groups["validation"] & rollouts
    assert result["demonstrations_from"] == "chosen"
    first = kept["train"][0]
    assert first.labels == (True, False) and first.source.startswith("steps.jsonl:")


def test_steps_of_a_prompt_that_has_pairs_stay_in_its_part(project: Project) -> None:
    source = project.file("rows.jsonl", pairs(40))
    project.run(source)
    asked = {part: [_asked(row) for row in project.pairs(part)] for part in PARTS}
    every = [prompt for part in PARTS for prompt in asked[part]]
    result = project.run(source, project.file("steps.jsonl", _steps(every)))
    for part, name in STEPS.items():
        found = [row.prompt[-1].content for row in read_records(project.out / name, StepLabels)]
        assert sorted(found) == sorted(asked[part])
    assert result["reasons"] == {"overlap": len(asked["judge"]) + len(asked["test"])}


def test_held_out_steps_meet_neither_demonstrations_nor_evaluation(project: Project) -> None:
    steps = project.file("steps.jsonl", _steps([f"Sum {n}?" for n in range(30)]))
    source = project.file("rows.jsonl", pairs(40))
    project.run(source, steps)
    held_out = next(iter(read_records(project.out / STEPS["validation"], StepLabels))).prompt[-1].content
    told = project.file("demos.jsonl", [{"instruction": held_out, "output": "Leak."}])
    asked = project.file("asked.jsonl", [{"prompt": held_out}, {"prompt": "Something else?"}])
    result = project.run(source, steps, told, eval_prompts=(asked,))
    assert result["reasons"] == {"overlap": 2} and not project.demonstrations()
    assert [prompt.prompt[-1].content for prompt in project.prompts("eval")] == ["Something else?"]


def test_contradictions_are_kept_marked_and_measured(project: Project) -> None:  # F24
    rows = pairs(20)
    swapped = {**rows[0], "chosen": rows[0]["rejected"], "rejected": rows[0]["chosen"], "annotator": "b"}
    rows[0]["annotator"], rows[1]["votes"] = "a", [3, 1]
    result = project.run(project.file("rows.jsonl", [*rows, swapped]))
    assert result["rows_kept"] == 21 and result["disputed"] == 3
    assert result["agreement"]["pairs_judged_more_than_once"] == 2
    assert result["agreement"]["contradicted_pairs"] == 2
    assert result["agreement"]["mean"] == pytest.approx((0 + 0.5) / 2)
    found = {item.source: item for part in PARTS for item in project.pairs(part)}
    assert found["rows.jsonl:1"].disputed and found["rows.jsonl:1"].agreement == 0.5
    assert found["rows.jsonl:21"].disputed and found["rows.jsonl:2"].agreement == 0.75
    assert not found["rows.jsonl:3"].disputed and found["rows.jsonl:3"].agreement is None


def test_two_annotators_who_agree_are_no_duplicate(project: Project) -> None:
    rows = pairs(20)
    first, second = {**rows[0], "annotator": "a"}, {**rows[0], "annotator": "b"}
    result = project.run(project.file("rows.jsonl", [first, second, second, *rows[1:]]))
    assert result["reasons"] == {"duplicate": 1}
    assert result["agreement"]["mean"] == 1.0


def test_group_by_prompt_parts_what_shares_an_opening(project: Project) -> None:
    rows = []
    for number in range(40):
        turns = [
            {"role": "user", "content": "Hello."},
            {"role": "assistant", "content": "Hello, what can I do?"},
            {"role": "user", "content": f"Question {number}?"},
        ]
        rows.append({**pairs(40)[number], "prompt": turns})
    source = project.file("rows.jsonl", rows)
    with pytest.raises(DataError, match="group_by: prompt"):
        project.run(source)
    assert all(project.run(source, group_by="prompt")["pairs"].values())


# When the whole is refused


@pytest.mark.parametrize("name", ["empty.jsonl", "header.csv", "blank.jsonl", "array.json"])
def test_empty_input_stops_the_stage(project: Project, name: str) -> None:  # F26
    content = {"header.csv": "prompt,chosen,rejected\n", "blank.jsonl": "\n\n", "array.json": "[]"}
    (project.folder / name).write_text(content.get(name, ""), encoding="utf-8")
    with pytest.raises(DataError, match=f"{name} has no rows"):
        project.run(name, min_pairs=0)


def test_a_filter_that_removes_every_row_stops_the_stage(project: Project) -> None:  # F26
    source = project.file("rows.jsonl", pairs(20))
    with pytest.raises(DataError, match="20 of 20 rows are faulty"):
        project.run(source, max_chars=5)
    with pytest.raises(DataError, match="0 preference pairs were kept"):
        project.run(source, max_chars=5, max_quarantine_share=1.0)
    with pytest.raises(DataError, match="none of 20 rows was kept"):
        project.run(source, max_chars=5, max_quarantine_share=1.0, min_pairs=0)


def test_too_many_faulty_rows_stop_the_stage_at_the_bound(project: Project) -> None:  # F17
    rows = pairs(18) + [{"instruction": f"Is {n} prime?", "output": True} for n in (2, 3)]
    source = project.file("rows.jsonl", rows)
    assert project.run(source, max_quarantine_share=0.1)["rows_refused"] == 2
    with pytest.raises(DataError) as caught:
        project.run(source, max_quarantine_share=0.09)
    message = str(caught.value)
    assert (
        "2 of 20 rows are faulty (10.0%)" in message and "rows.jsonl:19: output: must be a string" in message
    )
    assert "coerce" in message and "index.html" in message
    page = (project.docs / "index.html").read_text("utf-8")
    assert "Stopped" in page and "not_text" in page
    assert len((project.docs / "quarantine.jsonl").read_text("utf-8").splitlines()) == 2


def test_duplicates_are_no_faults(project: Project) -> None:
    rows = pairs(20)
    assert project.run(project.file("rows.jsonl", rows * 3))["reasons"] == {"duplicate": 40}


def test_too_few_pairs_stop_the_stage_at_the_floor(project: Project) -> None:
    source = project.file("rows.jsonl", pairs(20))
    assert project.run(source, min_pairs=20)["rows_kept"] == 20
    with pytest.raises(
        DataError, match=r"20 preference pairs were kept, the floor is 21 \(data\.min_pairs\)"
    ):
        project.run(source, min_pairs=21)


def test_pairs_whose_columns_are_not_known_are_named_at_the_floor(project: Project) -> None:
    rows = [{"prompt": f"Is {n} prime?", "response_1": "yes", "response_2": "no"} for n in range(30)]
    with pytest.raises(DataError) as caught:
        project.run(project.file("rows.jsonl", rows), min_pairs=10)
    message = str(caught.value)
    assert "0 preference pairs were kept" in message and "Kept were besides: 30 prompt." in message
    assert "rows.jsonl, 30 times: read as a prompt alone" in message and "response_1, response_2" in message


def test_agreement_below_its_bound_stops_the_stage(project: Project) -> None:
    rows = pairs(20)
    rows[0]["votes"] = [3, 1]
    source = project.file("rows.jsonl", rows)
    project.run(source, min_annotator_agreement=0.5)
    with pytest.raises(DataError, match=r"at least 0\.6, but it is 0\.5"):
        project.run(source, min_annotator_agreement=0.6)
    with pytest.raises(DataError, match="no pair was judged more than once"):
        project.run(project.file("plain.jsonl", pairs(20)), min_annotator_agreement=0.1)


def test_a_source_that_is_not_there_is_named(project: Project) -> None:
    with pytest.raises(DataError, match=r"absent\.jsonl: no such file"):
        project.run("absent.jsonl")


# What it costs


def test_importing_the_package_is_light() -> None:
    heavy = "great_expectations", "datasets", "pandas", "pyarrow", "torch", "numpy"
    code = f"import sys, data.pipeline; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_memory_does_not_follow_the_length_of_rows(project: Project) -> None:  # F19
    """20 MB of rows through both passes; the checks of the whole are left out, they hold no text either."""
    path = project.folder / "long.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for row in pairs(200):
            file.write(json.dumps({**row, "chosen": row["chosen"] + " word" * 20_000}) + "\n")
    code = (
        "import sys, resource, data.pipeline as p\n"
        "from data.config import DataParams\n"
        "from pathlib import Path\n"
        "p.check_files = lambda out, params: []\n"
        "p._gate_checks = lambda checks: None\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"p.run(DataParams(files=({str(path)!r},), max_chars=200_000), 0, Path('o'), Path('d'))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=project.folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 10_000, "kilobytes above the start"


def test_files_of_the_stage_are_named_once() -> None:
    assert {*PAIRS.values(), *STEPS.values()} < set(RECORD_FILES) < set(OUTPUTS)


def test_a_large_source_is_heard_of_while_it_is_read(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.intake._REPORT_ROWS", 5)
    heard: list[tuple[int, int, str]] = []
    name = project.file("many.jsonl", pairs(12))
    params = DataParams(files=(name,), min_pairs=1)
    run(params, 0, project.out, project.docs, lambda *said: heard.append(said))
    assert heard[0] == (0, heard[-1][1], "sources")
    assert heard[-1][0] == heard[-1][1] > 0
    assert heard[1:3] == [(5, 0, "rows of many.jsonl"), (10, 0, "rows of many.jsonl")]
