"""The three steps that meet the world outside: what they read, what they change, and that a second run
does nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from data.errors import ConfigurationError, InfrastructureError
from tasks import champion, register, sources
from tasks.overrides import write_overrides
from tasks.params import load
from tasks.places import digest, read_json, stage_folder, write_json
from tasks.recorder import Ending
from tasks.registry import Registry
from tests.tasks.test_lineage import recorded


def weights(project: Path, stage: str, text: str) -> str:
    """A stage's output with a model; its digest."""
    folder = stage_folder(project, stage)
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "weights").unlink(missing_ok=True)  # linked into the registry, as DVC's is read-only
    (folder / "model" / "weights").write_text(text)
    key = digest(folder / "model")
    write_json(folder / "result.json", {"status": "trained", "digest": key})
    return key


@pytest.fixture
def trained(project: Path) -> tuple[Path, str, str]:
    """A project with an SFT model and a candidate, the candidate's run recorded."""
    sft, candidate = weights(project, "sft", "sft"), weights(project, "optimize", "candidate")
    ending = Ending("FINISHED", outputs={"data/stages/optimize/model": candidate})
    recorded(project, ending, stage="optimize")
    write_json(stage_folder(project, "evaluate") / "result.json", {"win_rate": 0.6, "interval": [0.52, 0.68]})
    return project, sft, candidate


def decide(project: Path, candidate: str, against: str, promote: bool = True) -> dict[str, Any]:
    decision = {
        "promote": promote,
        "failed": [] if promote else ["KL"],
        "candidate": candidate,
        "champion": against,
    }
    write_json(stage_folder(project, "promote") / "decision.json", decision)
    return decision


def test_without_a_registry_the_sft_model_has_to_be_beaten(project: Path) -> None:
    sft = weights(project, "sft", "sft")
    weights(project, "optimize", "candidate")
    (project / ".plumbline" / "mlflow.db").unlink()
    assert champion.resolve(project, "tiny") == ({"digest": sft, "source": "sft"}, None)


def test_a_promoted_candidate_changes_nothing_when_run_again(trained: tuple[Path, str, str]) -> None:
    project, sft, candidate = trained
    params = load(project)
    before = champion.resolve(project, "tiny")[0]
    outcome, version = register.carry_out(project, params, decide(project, candidate, sft))
    assert (outcome["alias"], version and version.aliases) == ("champion", ("champion",))
    assert champion.resolve(project, "tiny")[0] == before
    again, same = register.carry_out(project, params, decide(project, candidate, sft))
    assert again == outcome
    assert same and version and same.version == version.version
    write_json(stage_folder(project, "register") / "register.json", outcome)
    assert register.unchanged(project, params)


def test_the_next_candidate_has_to_beat_the_champion(trained: tuple[Path, str, str]) -> None:
    project, sft, first = trained
    register.carry_out(project, load(project), decide(project, first, sft))
    second = weights(project, "optimize", "second")
    known, version = champion.resolve(project, "tiny")
    assert known == {"digest": first, "source": "registry"}
    assert version is not None
    assert version.digest == first
    outcome, promoted = register.carry_out(project, load(project), decide(project, second, first))
    assert outcome["alias"] == "champion"
    assert promoted is not None
    # Decided against the first, which is no longer champion: the baseline comes from the version's tags.
    assert champion.resolve(project, "tiny")[0] == known
    assert promoted.baseline == first
    # The run of restored weights says that it is one.
    kept = Path(promoted.source) / "weights"
    assert kept.samefile(stage_folder(project, "optimize") / "model" / "weights")


def test_rolled_back_weights_stay_out_and_the_baseline_stays(trained: tuple[Path, str, str]) -> None:
    project, sft, candidate = trained
    params = load(project)
    outcome, _ = register.carry_out(project, params, decide(project, candidate, sft))
    Registry(project, "tiny").rollback("lee", "bad")
    assert champion.resolve(project, "tiny")[0] == {"digest": sft, "source": "sft"}
    after, _ = register.carry_out(project, params, decide(project, candidate, sft))
    assert (after["registered"], after["alias"]) == (True, None)
    write_json(stage_folder(project, "register") / "register.json", outcome)
    assert not register.unchanged(project, params)
    forced, _ = register.carry_out(project, params, decide(project, candidate, sft), force=True)
    assert forced["alias"] == "champion"


def test_a_failed_gate_registers_nothing(trained: tuple[Path, str, str]) -> None:
    project, sft, candidate = trained
    outcome, version = register.carry_out(
        project, load(project), decide(project, candidate, sft, promote=False)
    )
    assert (outcome["registered"], outcome["reason"], version) == (False, "gates failed: KL", None)
    assert Registry(project, "tiny").versions() == []


def test_a_person_has_the_last_word_when_the_parameters_say_so(trained: tuple[Path, str, str]) -> None:
    project, sft, candidate = trained
    write_overrides(project, ["promote.require_human=true"])
    outcome, version = register.carry_out(project, load(project), decide(project, candidate, sft))
    assert outcome["alias"] == "challenger"
    assert version is not None
    assert version.aliases == ("challenger",)
    assert Registry(project, "tiny").champion() is None


def test_weights_that_are_not_the_registered_ones_are_refused(trained: tuple[Path, str, str]) -> None:
    project, sft, candidate = trained
    register.carry_out(project, load(project), decide(project, candidate, sft))
    version = Registry(project, "tiny").find("champion")
    weights(project, "optimize", "second")
    champion.bring(version, project / "brought")
    assert digest(project / "brought") == candidate
    (Path(version.source) / "weights").unlink()
    (Path(version.source) / "weights").write_text("other")
    with pytest.raises(InfrastructureError, match="are not the registered ones"):
        champion.bring(version, project / "brought")


def test_sources_follow_the_content_behind_a_name(project: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "own.jsonl").write_text("{}\n")
    (project / "base").mkdir()
    (project / "base" / "config.json").write_text("{}")
    write_overrides(project, [f"data.files=['{outside / 'own.jsonl'}', owner/name]"])
    first = sources.current(project, load(project))
    files = first["data.json"]["files"]
    assert isinstance(files, dict)
    assert files["owner/name"] == "not local: owner/name"
    for name, value in first.items():
        write_json(stage_folder(project, "sources") / name, value)
    assert sources.unchanged(project)
    (outside / "own.jsonl").write_text("{}\n{}\n")
    second = sources.current(project, load(project))
    assert not sources.unchanged(project)
    assert second["model.json"] == first["model.json"]
    (project / "base" / "config.json").write_text('{"a": 1}')
    assert sources.current(project, load(project))["model.json"] != first["model.json"]


def test_a_model_that_is_nowhere_is_named(project: Path) -> None:
    write_overrides(project, ["model.source=./nothing/here"])
    with pytest.raises(
        ConfigurationError, match=r"model.source = './nothing/here': neither a file or folder"
    ):
        sources.current(project, load(project))
    write_overrides(project, ["model.source=gguf:no_such_package"])
    with pytest.raises(ConfigurationError, match="the package 'no_such_package' is not installed"):
        sources.current(project, load(project))


def test_the_memo_spares_reading_again(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "base").mkdir()
    (project / "base" / "weights").write_bytes(b"w")
    (project / "rows.jsonl").write_text("{}")
    first = sources.current(project, load(project))

    def refuse(path: Path) -> str:
        raise AssertionError(f"{path} was read again")

    monkeypatch.setattr(sources, "digest", refuse)
    assert sources.current(project, load(project)) == first
    assert read_json(project / ".plumbline" / "digests.json")


def test_a_report_that_can_not_be_made_fails_nothing(
    trained: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(project: Path) -> Path:
        raise KeyError("slice")

    monkeypatch.setattr(register, "newest", broken)
    assert register._report(trained[0]) == []
    assert "the report could not be made: KeyError: 'slice'" in capsys.readouterr().err


def test_the_installed_encoder_is_known_by_its_content(project: Path) -> None:
    written = sources.current(project, load(project))["reward.json"]
    assert written["model"] == "minilm"
    assert re.fullmatch(r"[0-9a-f]{64}", str(written["digest"]))
