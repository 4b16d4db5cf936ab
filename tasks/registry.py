"""Which model is champion: MLflow's model registry, changed only by compare-and-set and never anonymously.

A version is a set of weights, known by digest; registering the same weights again gives the same version.
Aliases say what a version is for: `champion` serves, `challenger` waits. Every move is made under a lock,
only when the champion is still the one that the decision was made against, and leaves who, why and over whom
in the version's tags, so that a rollback knows the way back. Weights that were rolled back do not return
without force.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.errors import ConfigurationError, InfrastructureError
from tasks.lineage import client, experiment_id, keep_file, local_path
from tasks.store import lock, rows

CHAMPION = "champion"
CHALLENGER = "challenger"


@dataclass(frozen=True)
class Version:
    """One registered set of weights."""

    name: str
    version: str
    digest: str
    run_id: str
    source: str
    """Where its weights lie."""
    aliases: tuple[str, ...]
    tags: Mapping[str, str]

    @property
    def rolled_back(self) -> bool:
        return "plumbline.rolled_back_at" in self.tags

    @property
    def baseline(self) -> str | None:
        """Digest of the model that this one was decided against."""
        return self.tags.get("plumbline.baseline")


class Registry:
    """The versions of one registered model."""

    def __init__(self, project: Path, name: str) -> None:
        self.project = project
        self.name = name
        self._client: Any = client(project)

    def versions(self) -> list[Version]:
        """All versions, the oldest first; every one is read, whatever the page size."""
        aliases = self._aliases()
        found: list[Any] = []
        token: str | None = None
        while True:
            page = self._client.search_model_versions(
                f"name='{self.name}'", max_results=200, page_token=token
            )
            found += list(page)
            token = page.token
            if not token:
                break
        versions = [self._version(entry, aliases) for entry in found]
        return sorted(versions, key=lambda version: int(version.version))

    def find(self, wanted: str) -> Version:
        """A version by number, alias (`@champion` or `champion`) or digest prefix of at least 6
        characters.
        """
        key = wanted.removeprefix("@")
        versions = self.versions()
        for version in versions:
            if key == version.version or key in version.aliases:
                return version
        by_digest = [version for version in versions if len(key) >= 6 and version.digest.startswith(key)]
        if len(by_digest) == 1:
            return by_digest[0]
        known = ", ".join(f"{v.version}{'@' + ','.join(v.aliases) if v.aliases else ''}" for v in versions)
        raise ConfigurationError(
            f"{self.name}: no version is called {wanted!r}; known: {known or 'none, run the pipeline first'}"
        )

    def by_digest(self, digest: str) -> Version | None:
        """The version of these weights."""
        return next((version for version in self.versions() if version.digest == digest), None)

    def champion(self) -> Version | None:
        """Who is champion now."""
        return next((version for version in self.versions() if CHAMPION in version.aliases), None)

    def register(self, digest: str, model: Path, run_id: str, tags: Mapping[str, str]) -> Version:
        """The version of these weights, made when it is new; the weights become an artifact of the run."""
        with self._lock():
            known = self.by_digest(digest)
            if known is not None:
                return known
            source = keep_file(self._client, run_id, model, "model")
            if self._registered() is None:
                self._client.create_registered_model(self.name)
            text = {"plumbline.digest": digest, **{key: str(value) for key, value in tags.items()}}
            made = self._client.create_model_version(self.name, source, run_id, tags=text)
            return self._version(made, {})

    def challenge(self, version: Version) -> None:
        """Mark a version as the one that waits for a decision."""
        with self._lock():
            self._client.set_registered_model_alias(self.name, CHALLENGER, version.version)

    def promote(
        self, version: Version, expected: str | None, who: str, why: str, force: bool = False
    ) -> Version:
        """Make a version champion, if the champion is still `expected` (its digest, None for nobody)."""
        with self._lock():
            current = self.champion()
            if current is not None and current.digest == version.digest:
                return current
            self._compare(current, expected)
            version = self.find(version.version)
            self._require_finished(version)
            if version.rolled_back and not force:
                raise ConfigurationError(
                    f"{self.name} {version.version}: was rolled back by "
                    f"{version.tags.get('plumbline.rolled_back_by')} "
                    f"({version.tags.get('plumbline.rolled_back_why')}) and is not promoted again; --force "
                    "overrides"
                )
            self._tag(version, promoted_at=_now(), promoted_by=who, promoted_why=why)
            self._tag(version, over=current.version if current else "")
            if version.rolled_back:
                self._client.delete_model_version_tag(self.name, version.version, "plumbline.rolled_back_at")
            self._client.set_registered_model_alias(self.name, CHAMPION, version.version)
            if CHALLENGER in self._aliases_of(version.version):
                self._client.delete_registered_model_alias(self.name, CHALLENGER)
            return self.find(version.version)

    def rollback(self, who: str, why: str, expected: str | None = None) -> Version | None:
        """Give the crown back to the champion before; None when there was none, and the alias is then
        taken away.
        """
        with self._lock():
            current = self.champion()
            if current is None:
                raise ConfigurationError(f"{self.name}: there is no champion to roll back")
            if expected is not None:
                self._compare(current, expected)
            before = current.tags.get("plumbline.over", "")
            previous = self._standing(before)
            self._tag(current, rolled_back_at=_now(), rolled_back_by=who, rolled_back_why=why)
            if previous is None:
                self._client.delete_registered_model_alias(self.name, CHAMPION)
                return None
            self._client.set_registered_model_alias(self.name, CHAMPION, previous.version)
            return previous

    def _standing(self, number: str) -> Version | None:
        """The nearest earlier champion that was not itself rolled back."""
        versions = {version.version: version for version in self.versions()}
        seen: set[str] = set()
        while number in versions and number not in seen:
            seen.add(number)
            if not versions[number].rolled_back:
                return versions[number]
            number = versions[number].tags.get("plumbline.over", "")
        return None

    def _require_finished(self, version: Version) -> None:
        status = self._client.get_run(version.run_id).info.status
        if status != "FINISHED":
            raise ConfigurationError(
                f"{self.name} {version.version}: the run that made it is {status}, and only weights of a "
                "finished run "
                "are promoted; run the pipeline again"
            )

    def _compare(self, current: Version | None, expected: str | None) -> None:
        have = current.digest if current else None
        if have != expected:
            raise InfrastructureError(
                f"{self.name}: the champion is {_short(have)}, but the decision was made against "
                f"{_short(expected)}; "
                "run the pipeline again, so that the candidate is compared with the present champion"
            )

    def _registered(self) -> Any | None:
        found = self._client.search_registered_models(f"name='{self.name}'", max_results=1)
        return found[0] if found else None

    def _aliases(self) -> dict[str, list[str]]:
        if self._registered() is None:
            return {}
        aliases: dict[str, list[str]] = {}
        for alias, version in dict(self._client.get_registered_model(self.name).aliases).items():
            aliases.setdefault(str(version), []).append(alias)
        return aliases

    def _aliases_of(self, version: str) -> list[str]:
        return self._aliases().get(version, [])

    def _version(self, entry: Any, aliases: Mapping[str, list[str]]) -> Version:
        tags = dict(entry.tags)
        return Version(
            name=self.name,
            version=str(entry.version),
            digest=tags.get("plumbline.digest", ""),
            run_id=str(entry.run_id),
            source=str(entry.source),
            aliases=tuple(sorted(aliases.get(str(entry.version), []))),
            tags=tags,
        )

    def _tag(self, version: Version, **values: str) -> None:
        for key, value in values.items():
            self._client.set_model_version_tag(self.name, version.version, f"plumbline.{key}", value[:4000])

    def _lock(self) -> Any:
        return lock(self.project, "registry")

    def producing_run(self, digest: str, stage: str) -> str:
        """The stage run whose model has this digest, newest first; weights that DVC restored get a run
        that says so.
        """
        path = f"data/stages/{stage}/model"
        query = (
            f"tags.`plumbline.stage` = '{stage}' and tags.`plumbline.out.{path}` = '{digest}' "
            "and attributes.status = 'FINISHED'"
        )
        where = [experiment_id(self._client)]
        found = self._client.search_runs(where, query, order_by=["attributes.start_time DESC"], max_results=1)
        if found:
            return str(found[0].info.run_id)
        tags = {"plumbline.kind": "stage", "plumbline.stage": stage, "plumbline.restored": "true"}
        tags[f"plumbline.out.{path}"] = digest
        run = self._client.create_run(where[0], run_name=f"{stage} (restored by DVC)", tags=tags)
        self._client.set_terminated(run.info.run_id, "FINISHED")
        return str(run.info.run_id)


def peek(project: Path, name: str) -> list[Version]:
    """All versions, read without mlflow where the store is the project's own file."""
    versions = rows(project, "SELECT version, run_id, source FROM model_versions WHERE name = ?", [name])
    tags = rows(project, "SELECT version, key, value FROM model_version_tags WHERE name = ?", [name])
    aliases = rows(project, "SELECT version, alias FROM registered_model_aliases WHERE name = ?", [name])
    if versions is None or tags is None or aliases is None:
        return Registry(project, name).versions()
    found: list[Version] = []
    for version, run_id, source in sorted(versions, key=lambda row: int(row[0])):
        own = {key: value for number, key, value in tags if number == version}
        called = tuple(sorted(alias for number, alias in aliases if number == version))
        found.append(Version(name, version, own.get("plumbline.digest", ""), run_id, source, called, own))
    return found


def fetch(version: Version) -> Path:
    """The folder of a version's weights; downloaded where the artifacts are on a server."""
    local = local_path(version.source)
    if local is None:
        from mlflow.artifacts import download_artifacts

        return Path(str(download_artifacts(artifact_uri=version.source)))
    if not local.is_dir():
        raise InfrastructureError(
            f"{local}: the weights of {version.name} {version.version} are gone; run `dvc pull` and "
            "`plumbline "
            f"reproduce {version.name}@{version.version}`"
        )
    return local


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "nobody"
