"""The stage's side of lineage: a process of its own that watches the stage's work folder and tells MLflow.

Importing mlflow takes seconds and 200 MB, and doing it in a thread beside other imports can deadlock
(CPython's import locks before 3.13). So the stage starts this program, hands it one line that says what
begins and one that says how it ended, and goes on. The program reads metrics from the directory, as everybody
does. It dies with the stage; a run that it could not close is closed by the next sweep.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tasks import process
from tasks.places import read_json
from tasks.status import masked

MEMORY = "run.json"
"""In the work folder: the id of the run that this work is recorded in."""


@dataclass(frozen=True)
class Entry:
    """What is known of a stage when it starts."""

    project: Path
    stage: str
    pipeline: str
    """Fingerprint of the whole pipeline's parameters: names the parent run."""
    fingerprint: str
    owner: str
    """The process whose life is the pipeline's."""
    process: str
    """The process whose life is the stage's."""
    work: Path
    registry_name: str
    params: Mapping[str, object] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Path below the project -> digest."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Git commit, digest of dvc.lock, versions, hardware."""


@dataclass(frozen=True)
class Ending:
    """What is known of a stage when it ends."""

    status: str
    """FINISHED, FAILED or KILLED."""
    reason: str = ""
    outputs: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[tuple[Path, str]] = ()
    """Files and folders to keep as artifacts, with their names there."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class Recorder:
    """The program, running beside a stage."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self._program = subprocess.Popen(
            [sys.executable, "-m", "tasks.recorder"],
            stdin=subprocess.PIPE,
            cwd=entry.project,
            env=process.environment(1, hub_offline=True),
            process_group=0,
        )
        process.SPARED.add(self._program.pid)
        self._say({**asdict(entry), "project": str(entry.project), "work": str(entry.work)})

    @property
    def run_id(self) -> str | None:
        """The run, once it is open."""
        file = self.entry.work / MEMORY
        return str(read_json(file)["run_id"]) if file.is_file() else None

    def finish(self, ending: Ending, timeout: float = 600.0) -> None:
        """Have the rest written and the run closed. A store that fails is told, and never fails the stage."""
        files = [(str(path), name) for path, name in ending.files]
        self._say({**asdict(ending), "files": files})
        with contextlib.suppress(OSError):
            assert self._program.stdin is not None
            self._program.stdin.close()
        try:
            code = self._program.wait(timeout)
        except subprocess.TimeoutExpired:
            self._program.kill()
            code = self._program.wait()
        process.SPARED.discard(self._program.pid)
        if code:
            print(
                f"{self.entry.stage}: lineage is incomplete; the next command's sweep closes the run",
                file=sys.stderr,
            )

    def _say(self, value: Mapping[str, object]) -> None:
        assert self._program.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its exit code tells
            self._program.stdin.write(json.dumps(value, default=str).encode() + b"\n")
            self._program.stdin.flush()


def main() -> int:
    """Read what begins, record until told how it ended."""
    process.bind()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the stage says when
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
        first = json.loads(stdin.readline())
        entry = Entry(**{**first, "project": Path(first["project"]), "work": Path(first["work"])})

        def ending(seconds: float) -> Ending | None:
            ready, _, _ = select.select([stdin], [], [], seconds)
            if not ready:
                return None
            line = stdin.readline()
            if not line:
                raise EOFError("the stage is gone")
            value = json.loads(line)
            return Ending(**{**value, "files": [(Path(path), name) for path, name in value["files"]]})

        from tasks.lineage import record

        try:
            record(entry, ending)
        except Exception as error:  # noqa: BLE001 - whatever the store does, the stage goes on
            print(f"{entry.stage}: lineage: {masked(str(error))}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
