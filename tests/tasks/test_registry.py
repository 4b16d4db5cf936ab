"""The champion changes only by compare-and-set, by name and reason, and back again."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from data.errors import ConfigurationError, InfrastructureError, PlumblineError
from tasks.places import digest
from tasks.recorder import Ending
from tasks.registry import Registry, Version, fetch
from tests.tasks.test_lineage import recorded


@pytest.fixture
def registry(project: Path) -> Registry:
    return Registry(project, "tiny")


def add(registry: Registry, text: str, **tags: str) -> Version:
    model = registry.project / f"model-{text}"
    model.mkdir(exist_ok=True)
    (model / "weights").write_text(text)
    key = digest(model)
    run = recorded(
        registry.project, Ending("FINISHED", outputs={"data/stages/optimize/model": key}), stage=text
    )
    return registry.register(key, model, run, tags)


def test_a_version_is_a_set_of_weights(registry: Registry) -> None:
    assert registry.champion() is None
    one = add(registry, "a", **{"plumbline.baseline": "sft"})
    again = registry.register(one.digest, registry.project / "model-a", one.run_id, {})
    assert (again.version, len(registry.versions()), one.baseline) == ("1", 1, "sft")
    assert digest(fetch(one)) == one.digest
    assert registry.find(one.digest[:8]).version == registry.find("1").version == "1"
    with pytest.raises(ConfigurationError, match=r"no version is called '@champion'; known: 1"):
        registry.find("@champion")


def test_promotion_is_compared_and_leaves_who_and_why(registry: Registry) -> None:
    one, two = add(registry, "a"), add(registry, "b")
    crowned = registry.promote(one, None, "kim", "better")
    assert crowned.aliases == ("champion",)
    assert (crowned.tags["plumbline.promoted_by"], crowned.tags["plumbline.promoted_why"]) == (
        "kim",
        "better",
    )
    with pytest.raises(InfrastructureError, match="decision was made against nobody"):
        registry.promote(two, None, "kim", "stale")
    registry.challenge(two)
    assert registry.promote(two, one.digest, "kim", "better still").aliases == ("champion",)
    assert registry.find("1").aliases == ()
    # Saying it again changes nothing, whatever was expected.
    assert registry.promote(two, None, "kim", "again").version == "2"


def test_rollback_returns_to_the_champion_before_and_stays(registry: Registry) -> None:
    one, two, three = add(registry, "a"), add(registry, "b"), add(registry, "c")
    registry.promote(one, None, "kim", "first")
    registry.promote(two, one.digest, "kim", "second")
    registry.promote(three, two.digest, "kim", "third")
    back = registry.rollback("lee", "it refuses everything")
    assert back is not None
    assert back.version == "2"
    with pytest.raises(ConfigurationError, match=r"rolled back by lee \(it refuses everything\).*--force"):
        registry.promote(three, two.digest, "kim", "again")
    before = registry.rollback("lee", "this one too")
    assert before is not None
    assert before.version == "1"
    assert registry.rollback("lee", "all of them") is None
    assert registry.champion() is None
    with pytest.raises(ConfigurationError, match="no champion to roll back"):
        registry.rollback("lee", "once more")
    forced = registry.promote(three, None, "kim", "it was the prompt", force=True)
    assert (forced.aliases, forced.rolled_back) == (("champion",), False)


def test_a_rollback_skips_champions_that_were_rolled_back(registry: Registry) -> None:
    one, two, three = add(registry, "a"), add(registry, "b"), add(registry, "c")
    registry.promote(one, None, "kim", "first")
    registry.promote(two, one.digest, "kim", "second")
    registry.rollback("lee", "bad")
    registry.promote(two, one.digest, "kim", "forced", force=True)
    registry.promote(three, two.digest, "kim", "third")
    back = registry.rollback("lee", "bad too")
    assert back is not None
    assert back.version == "2"


def test_of_two_promotions_at_once_one_wins(registry: Registry) -> None:
    versions = [add(registry, text) for text in "abcd"]
    errors: list[PlumblineError] = []

    def promote(version: Version) -> None:
        try:
            Registry(registry.project, "tiny").promote(version, None, "kim", "first come")
        except PlumblineError as error:
            errors.append(error)

    rivals = [threading.Thread(target=promote, args=(version,)) for version in versions]
    for rival in rivals:
        rival.start()
    for rival in rivals:
        rival.join()
    assert len(errors) == 3
    assert sum("champion" in version.aliases for version in registry.versions()) == 1


def test_weights_of_an_unfinished_run_are_not_promoted(registry: Registry) -> None:
    version = add(registry, "a")
    registry._client.update_run(version.run_id, status="KILLED")
    with pytest.raises(ConfigurationError, match="the run that made it is KILLED"):
        registry.promote(version, None, "kim", "why not")


def test_the_run_of_restored_weights_says_so(registry: Registry) -> None:
    version = add(registry, "a")
    assert registry.producing_run(version.digest, "optimize") != version.run_id  # that run is stage "a"
    made = registry.producing_run("0" * 64, "optimize")
    tags = registry._client.get_run(made).data.tags
    assert tags["plumbline.restored"] == "true"
    assert registry.producing_run("0" * 64, "optimize") == made
