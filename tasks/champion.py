"""Who has to be beaten: the present champion, by digest of its weights; the outside world's one way in.

No champion: the SFT model. The champion is this workspace's own candidate: the baseline that it was decided
against, so that a second run changes nothing. Any other champion: its weights, linked from the registry's
artifacts.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from data.errors import InfrastructureError
from tasks.places import Json, digest, read_json, stage_folder
from tasks.publish import link_tree
from tasks.registry import CHAMPION, Version, fetch, peek
from tasks.stage import Stage, run


def resolve(project: Path, name: str) -> tuple[Json, Version | None]:
    """What champion.json holds now, and the version whose weights belong to it (None: the SFT model's)."""
    sft = str(read_json(stage_folder(project, "sft") / "result.json")["digest"])
    candidate = read_json(stage_folder(project, "optimize") / "result.json").get("digest")
    nobody: Json = {"digest": sft, "source": "sft"}
    versions = peek(project, name)
    champion = next((version for version in versions if CHAMPION in version.aliases), None)
    if champion is None:
        return nobody, None
    wanted = champion.digest
    if wanted == candidate and champion.baseline is not None:
        wanted = champion.baseline
    if wanted == sft:
        return nobody, None
    version = next((version for version in versions if version.digest == wanted), None)
    if version is None:
        raise InfrastructureError(
            f"registry {name}: the weights {wanted[:12]} that {champion.version} was decided against are not "
            "registered; restore the registry, or start a new one with registry.name"
        )
    return {"digest": wanted, "source": "registry"}, version


def unchanged(project: Path, name: str) -> bool:
    """True when the published champion is the present one."""
    file = stage_folder(project, "champion") / "champion.json"
    return file.is_file() and read_json(file) == resolve(project, name)[0]


def bring(version: Version, model: Path) -> None:
    """Link a version's weights to a folder; weights that are not the registered ones are refused."""
    shutil.rmtree(model, ignore_errors=True)
    link_tree(fetch(version), model)
    found = digest(model)
    if found != version.digest:
        raise InfrastructureError(
            f"{version.source}: the weights of {version.name} {version.version} are not the registered ones "
            f"(digest {found[:12]}, expected {version.digest[:12]}); restore the artifact, or roll back"
        )


def body(stage: Stage) -> None:
    """Write the champion's digest, and its weights when they are not the SFT model's."""
    champion, version = resolve(stage.project, stage.params.registry.name)
    if version is None:
        stage.publish_result(champion, file="champion.json")
        return
    bring(version, stage.work / "model")
    stage.publish_result(champion, "model", file="champion.json")


if __name__ == "__main__":
    run("champion", body, outer=True)
