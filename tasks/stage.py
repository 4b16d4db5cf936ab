"""Running one stage of the DAG: from its row in dvc.yaml to its published output.

    python -m tasks.sft

reads params.yaml and the outputs above it, names its work folder by the fingerprint of all that can change
the result (its parameters, the digests of its inputs and of its code), launches the training program there as
its own process group, follows its files into status and lineage, and publishes the output complete or not at
all. Run again with the same fingerprint it goes on from the last complete checkpoint; what is finished is
only published again.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

import yaml
from filelock import FileLock, Timeout
from pydantic import BaseModel

from data.errors import (
    ConfigurationError,
    DataError,
    DivergenceError,
    InfrastructureError,
    PlumblineError,
    Stopped,
    exit_code,
)
from tasks import facts, process
from tasks.follow import Metrics
from tasks.params import FILE, Params, flat, load
from tasks.places import STAGES, Json, digest, digest_of, home, read_json, root, stage_folder, write_json
from tasks.publish import check_writable, dvc_digest, link_tree, locked_outputs, publish, tidy, work_lock
from tasks.recorder import Ending, Entry, Recorder
from tasks.results import document, headline
from tasks.status import Status, masked

Body = Callable[["Stage"], None]
_ERRORS: dict[str, type[PlumblineError]] = {
    kind.kind: kind for kind in (ConfigurationError, DataError, DivergenceError, InfrastructureError, Stopped)
}
LAUNCHER = "training.launch"
_POLL_SECONDS = 0.25
_PRINT_SECONDS = 15.0


class Stop:
    """A wish to end: raised at once where nothing is launched, else noted and handed to the program."""

    def __init__(self) -> None:
        self.asked = False
        self.launched = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        first, self.asked = not self.asked, True
        if first and not self.launched:
            raise Stopped(f"the stage was asked to stop (signal {number}); run it again to go on")


@dataclass
class Stage:
    """What a stage's own module works with."""

    name: str
    project: Path
    params: Params
    work: Path
    fingerprint: str
    pipeline: str
    inputs: Mapping[str, str]
    status: Status
    stop: Stop
    read: Mapping[str, object] = field(default_factory=dict)
    """Each parameter's value and each code file's digest, as they were when the stage began."""
    recorder: Recorder | None = None
    published: tuple[str, ...] = ()
    built: Path = Path()
    """Where the published files lie too."""
    afterwards: Callable[[], object] | None = None
    """What is done when the stage's own run is closed."""

    def output_of(self, stage: str, *parts: str) -> Path:
        """A path in the output of a stage above."""
        return stage_folder(self.project, stage).joinpath(*parts)

    def result_of(self, stage: str, file: str = "result.json") -> Json:
        """What a stage above says about itself."""
        return read_json(self.output_of(stage, file))

    def launch(
        self,
        program: str,
        section: BaseModel,
        inputs: Mapping[str, Path],
        processes: int = 1,
        threads: int = 1,
        hub_offline: bool = True,
    ) -> Json:
        """Run a training program in the work folder, follow it to its end, return its result."""
        result = self.work / "result.json"
        if result.is_file():
            return read_json(result)
        config = {
            "stage": self.name,
            "program": program,
            "params": section.model_dump(mode="json"),
            "seed": self.params.seed,
            "dtype": self.params.model.dtype,
            "inputs": {name: self._relative(path) for name, path in inputs.items()},
        }
        write_json(self.work / "config.json", config)
        (self.work / "error.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", LAUNCHER, "--processes", str(processes)]
        if self.params.pipeline.hostfile:
            command += ["--hostfile", self.params.pipeline.hostfile]
        command += ["-m", program, str(self.work)]
        spin = process.spin_of(self.name, threads * processes)
        surroundings = process.environment(threads, hub_offline, spin)
        self.stop.launched = True
        running = process.Program(command, self.project, surroundings, self.work / "output.log")
        try:
            code = self._follow(running)
        finally:
            running.kill()
            self.stop.launched = False
        if result.is_file():
            return read_json(result)
        raise self._failure(running, code)

    def publish(self, *names: str, folder: Path | None = None) -> None:
        """Make the output of these files and folders, which lie in the work folder or in one below it."""
        self.built = folder or self.work
        publish(self.project, self.name, self.built, names)
        self.published = names

    def publish_result(self, result: Mapping[str, object], *names: str, file: str = "result.json") -> None:
        """Write the stage's own result and publish it with other files of the work folder.

        It is built in a folder of its own: `result.json` of the work folder is the training program's.
        """
        folder = self.work / "out"
        shutil.rmtree(folder, ignore_errors=True)
        write_json(folder / file, dict(result))
        for name in names:
            link_tree(self.work / name, folder / name)
        self.publish(file, *names, folder=folder)

    def not_run(self, reason: str) -> None:
        """An output that says why there is nothing to see; not a failure, so that the report still
        appears.
        """
        print(f"{self.name}: not run: {reason}")
        self.publish_result({"status": "not_run", "reason": reason})

    def progress(self, step: int, total: int, unit: str = "step") -> None:
        """Tell a watcher how far a stage without a program is."""
        self.status.update(progress={"step": step, "total": total, "unit": unit})

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.project).as_posix() if path.is_relative_to(self.project) else str(path)

    def _follow(self, running: process.Program) -> int:
        rows = Metrics(self.work / "metrics.jsonl")
        deadline, printed = float("inf"), time.monotonic()
        while True:
            code = running.poll(_POLL_SECONDS)
            newest = self._read(rows)
            if self.stop.asked and deadline == float("inf"):
                deadline = time.monotonic() + self.params.pipeline.grace_seconds
                running.ask_to_stop()
            if newest and time.monotonic() - printed > _PRINT_SECONDS:
                printed = time.monotonic()
                print(f"{self.name}: {newest}", flush=True)
            if code is not None:
                self._read(rows)
                return code
            if time.monotonic() > deadline:
                running.kill()

    def _read(self, rows: Metrics) -> str:
        """Hand on what is new; returns a line that says where the program is."""
        new = rows.read()
        for _, values in new:
            self.status.metrics(values)
        file = self.work / "progress.json"
        where = read_json(file) if file.is_file() else self.status.value["progress"]
        self.status.update(progress=where, run_id=self.recorder.run_id if self.recorder else None)
        assert isinstance(where, dict)
        shown = ", ".join(f"{key} {value:.4g}" for key, value in (new[-1][1] if new else {}).items())
        return (
            f"{where.get('unit', 'step')} {where.get('step')}/{where.get('total')} {shown[:150]}"
            if new
            else ""
        )

    def _failure(self, running: process.Program, code: int) -> PlumblineError:
        if self.stop.asked:
            return Stopped(f"{self.name} was asked to stop; run it again to go on from its last checkpoint")
        file = self.work / "error.json"
        if file.is_file():
            error = read_json(file)
            kind = _ERRORS.get(str(error.get("kind")), InfrastructureError)
            return kind(str(error.get("message")))
        cause = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        words = running.last_words()
        return InfrastructureError(
            f"{self.name}: the training program {cause} and left no result; a kill by the system for want of "
            "memory "
            f"looks like this (lower token_budget). The end of {self.work / 'output.log'}:\n{words}"
        )


def run(name: str, body: Body, outer: bool = False) -> NoReturn:
    """Run a stage's body with everything around it, and leave with the exit code of its kind of failure.

    `outer`: the stage runs at every repro and touches the world outside; lineage notes it only when it
    changed something, so that running a finished pipeline again leaves no trace.
    """
    process.bind()
    code = 0
    project = root()
    os.chdir(project)
    status = Status(project, name)
    stop = Stop()
    stage: Stage | None = None
    try:
        with _alone(project, name):
            tidy(project)
            check_writable(project)
            stage = begin(project, name, status, stop)
            if not outer:
                stage.recorder = Recorder(_entry(stage))
            body(stage)
            _require_unchanged(stage)
            if outer and locked_outputs(project).get(name) != dvc_digest(stage.built, stage.published):
                stage.recorder = Recorder(_entry(stage))
            _end(stage, Ending("FINISHED", "", _outputs(stage), _kept(stage), _headline(stage)))
            if stage.afterwards is not None:
                stage.afterwards()
            status.update(state="done", kind=None, message="")
    except Exception as error:  # noqa: BLE001 - every failure is told by kind, none gets away
        code = _fail(error, name, status, stage)
    sys.stdout.flush()
    sys.stderr.flush()
    raise SystemExit(code)


def begin(project: Path, name: str, status: Status, stop: Stop) -> Stage:
    """Parameters, fingerprint and work folder of a stage."""
    params = load(project)
    row = _row(project, name)
    inputs = {path: digest(project / path) for path in row.inputs}
    seen, code = _read_by(project, params, row)
    fingerprint = digest_of({"stage": name, "params": seen, "inputs": inputs, "code": code})
    work = home(project) / "work" / name / fingerprint[:16]
    work.mkdir(parents=True, exist_ok=True)
    status.update(fingerprint=fingerprint)
    pipeline = digest_of(params.model_dump(mode="json"))
    return Stage(
        name, project, params, work, fingerprint, pipeline, inputs, status, stop, {**flat(seen), **code}
    )


def _read_by(project: Path, params: Params, row: Row) -> tuple[dict[str, object], dict[str, str]]:
    """Values of the parameters and digests of the code that a stage reads."""
    seen = {key: _value(params, key) for key in row.params}
    return seen, {path: digest(project / path) for path in row.code}


def _require_unchanged(stage: Stage) -> None:
    """DVC notes parameters and code as they are when a stage ends, so they must be those it began with."""
    row = _row(stage.project, stage.name)
    seen, code = _read_by(stage.project, load(stage.project), row)
    then, now = stage.read, {**flat(seen), **code}
    edited = [
        f"{key} is another file now" if key in code else
        f"{FILE}: {key} was {then.get(key, 'not there')!r}, is {now.get(key, 'not there')!r}"
        for key in sorted({*then, *now}) if then.get(key) != now.get(key)
    ]  # fmt: skip
    if edited:
        raise ConfigurationError(
            f"{stage.name}: changed while the stage ran: {'; '.join(edited)}; its result is of the old and "
            "is not taken for one of the new. Run again to use the new; or put the old back and run again: "
            "the work is kept"
        )


@dataclass(frozen=True)
class Row:
    """A stage of dvc.yaml."""

    inputs: tuple[str, ...]
    """Dependencies that are outputs of other stages."""
    code: tuple[str, ...]
    """All other dependencies."""
    params: tuple[str, ...]


def read_dag(project: Path) -> dict[str, Row]:
    """The stages of dvc.yaml with what they depend on."""
    dag = yaml.safe_load((project / "dvc.yaml").read_text(encoding="utf-8"))
    rows: dict[str, Row] = {}
    for name, entry in dag["stages"].items():
        deps = [str(next(iter(dep))) if isinstance(dep, dict) else str(dep) for dep in entry.get("deps", [])]
        inputs = tuple(dep for dep in deps if dep.startswith(STAGES.as_posix() + "/"))
        keys: list[str] = []
        for param in entry.get("params", []):
            keys += [key for names in param.values() for key in names] if isinstance(param, dict) else [param]
        rows[name] = Row(inputs, tuple(dep for dep in deps if dep not in inputs), tuple(keys))
    return rows


def _row(project: Path, name: str) -> Row:
    row = read_dag(project).get(name)
    if row is None:
        raise ConfigurationError(f"dvc.yaml: there is no stage {name!r}; add it or restore the file")
    return row


def _value(params: Params, key: str) -> object:
    value: object = params.model_dump(mode="json")
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ConfigurationError(
                f"dvc.yaml: params: {key} is no key of {FILE}; correct the stage's params list"
            )
        value = value[part]
    return value


def _alone(project: Path, name: str) -> FileLock:
    """The lock of the one running instance; a killed predecessor may need some seconds to be gone."""
    lock = FileLock(work_lock(project, name))
    try:
        lock.acquire(timeout=30)
    except Timeout as error:
        raise InfrastructureError(
            f"{name}: another process runs this stage in this folder (lock {lock.lock_file}); wait for it or "
            "stop it"
        ) from error
    return lock


def _entry(stage: Stage) -> Entry:
    keys = read_dag(stage.project)[stage.name].params
    return Entry(
        project=stage.project,
        stage=stage.name,
        pipeline=stage.pipeline,
        fingerprint=stage.fingerprint,
        owner=process.owner(),
        process=process.identity(os.getpid()),
        work=stage.work,
        registry_name=stage.params.registry.name,
        params=flat({key: _value(stage.params, key) for key in keys}),
        inputs=stage.inputs,
        facts=facts.gather(stage.project),
    )


def _outputs(stage: Stage) -> dict[str, str]:
    """Digest of the published folder and of each thing in it, by path below the project."""
    if not stage.published:
        return {}
    folder = stage_folder(stage.project, stage.name)
    where = (STAGES / stage.name).as_posix()
    each = {f"{where}/{name}": digest(folder / name) for name in stage.published}
    return {where: digest(folder), **each}


def _headline(stage: Stage) -> dict[str, float]:
    """The numbers of the stage's result document, by which its runs are compared."""
    file = document(stage.project, stage.name)
    return headline(read_json(file)) if file.is_file() else {}


def _kept(stage: Stage) -> list[tuple[Path, str]]:
    """Small files of the stage for the run; weights are kept by the registry alone."""
    paths = [stage.built / name for name in stage.published]
    paths += [stage.work / name for name in ("config.json", "timing.jsonl", "output.log")]
    return [(path, path.name) for path in paths if path.is_file() and path.stat().st_size < 20_000_000]


def _end(stage: Stage, ending: Ending) -> None:
    if stage.recorder is not None:
        stage.recorder.finish(ending)
        stage.status.update(run_id=stage.recorder.run_id)


def _fail(error: Exception, name: str, status: Status, stage: Stage | None) -> int:
    kind = error.kind if isinstance(error, PlumblineError) else "infrastructure"
    message = masked(str(error) or type(error).__name__)
    status.update(state="failed", kind=kind, message=message)
    print(f"{name}: {kind}: {message}", file=sys.stderr)
    if not isinstance(error, PlumblineError):
        print(masked("".join(traceback.format_exception(error))), file=sys.stderr)
    if stage is not None:
        files: Sequence[tuple[Path, str]] = _kept(stage)
        _end(stage, Ending("KILLED" if kind == "stopped" else "FAILED", f"{kind}: {message}", {}, files))
        status.update(state="failed", kind=kind, message=message)
    return exit_code(error)
