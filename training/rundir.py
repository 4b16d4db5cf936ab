"""The directory through which a training program speaks; no callback crosses it.

In: config.json. Out: metrics.jsonl and journal.jsonl (deterministic, so that two runs give the same bytes),
timing.jsonl (clock times, resume events), progress.json, result.json (last), error.json on failure. Rank 0
writes; the other ranks are silent, but any rank may leave the first error.json.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from data.errors import ConfigurationError, PlumblineError, exit_code
from training import lifeline

FOLLOWED = ("metrics.jsonl", "journal.jsonl")
Params = TypeVar("Params", bound=BaseModel)


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file atomically: a reader sees the old text or the new one, a crash leaves one of
    them."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class RunDir:
    """One run of one training program. `open` it once a process, `finish` it once."""

    def __init__(self, path: Path, rank: int, config: dict[str, Any]) -> None:
        self.path = path
        self.rank = rank
        self.config = config
        self.stop_requested = False

    @classmethod
    def open(cls, path: Path, rank: int) -> RunDir:
        """Reads config.json, removes what an earlier try ended with, and turns SIGTERM and SIGINT into a
        wish."""
        file = path / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise ConfigurationError(f"{file}: no readable run configuration ({error})") from error
        missing = {"stage", "program", "params", "seed", "inputs"} - set(config)
        if missing:
            raise ConfigurationError(f"{file}: keys missing: {', '.join(sorted(missing))}")
        run = cls(path, rank, config)
        if rank == 0:
            for name in ("error.json", "result.json"):
                (path / name).unlink(missing_ok=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, run._on_signal)
        return run

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop_requested = True

    @property
    def seed(self) -> int:
        """Seed of the run; 0 is a seed like any other."""
        return int(self.config["seed"])

    def params(self, section: type[Params]) -> Params:
        """The run's section of the parameters; an impossible one names its keys."""
        try:
            return section.model_validate(self.config["params"])
        except ValidationError as error:
            raise ConfigurationError(f"{self.path / 'config.json'}: params: {error}") from error

    def input(self, name: str) -> Path:
        """Path of an input by its name, relative ones from the project folder (the working directory)."""
        try:
            path = Path(self.config["inputs"][name])
        except KeyError:
            raise ConfigurationError(
                f"{self.path / 'config.json'}: inputs.{name} is missing; given: "
                f"{sorted(self.config['inputs'])}"
            ) from None
        if not path.exists():
            raise ConfigurationError(f"inputs.{name}: {path} does not exist")
        return path

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Appends one step's numbers; only what a second run would repeat, never a clock time. NaN becomes
        null."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._append("metrics.jsonl", {"step": step, **finite})

    def timing(self, step: int, values: Mapping[str, float | str]) -> None:
        """Appends what differs from run to run: seconds, memory, tokens per second, resume events."""
        self._append("timing.jsonl", {"step": step, "time": time.time(), **values})

    def journal(self, event: str, **fields: Any) -> None:
        """Appends a decision with what it was based on."""
        self._append("journal.jsonl", {"event": event, **fields})

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        if self.rank:
            return
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def progress(self, step: int, total: int, unit: str = "step") -> None:
        """Tells a watcher how far the work is."""
        if self.rank == 0:
            write_json(self.path / "progress.json", {"step": step, "total": total, "unit": unit})

    def offsets(self) -> dict[str, int]:
        """Sizes of the deterministic files, to be kept in a checkpoint; what they count is on the disk."""
        for name in FOLLOWED:
            if (self.path / name).exists():
                with (self.path / name).open("rb") as file:
                    os.fsync(file.fileno())
        return {name: _size(self.path / name) for name in FOLLOWED}

    def lost(self, offsets: Mapping[str, int]) -> str:
        """Which deterministic file is shorter than a checkpoint has seen it, with both sizes; empty: none."""
        for name in FOLLOWED:
            size, wanted = _size(self.path / name), offsets.get(name, 0)
            if size < wanted:
                return f"{self.path / name} holds {size} bytes, {wanted} were written before the checkpoint"
        return ""

    def rewind(self, offsets: Mapping[str, int]) -> None:
        """Cuts the deterministic files back to a checkpoint (to nothing without one): no gap, no double
        line."""
        if self.rank:
            return
        for name in FOLLOWED:
            path, wanted = self.path / name, offsets.get(name, 0)
            if _size(path) > wanted:
                os.truncate(path, wanted)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Writes result.json; its existence says that everything else is complete."""
        if self.rank == 0:
            write_json(self.path / "result.json", dict(result))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch; call it before a new head or adapter is initialised."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def program(main: Callable[[RunDir], None]) -> None:
    """Runs a training program as a process: `python -m training.NAME WORKDIR`, its failures as files and
    exit codes."""
    lifeline.bind()
    # The deepspeed launcher adds --local_rank=N; torchrun says the same by environment.
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    if len(arguments) != 1:
        print(f"usage: python -m training.PROGRAM WORKDIR (got {len(arguments)} arguments)", file=sys.stderr)
        raise SystemExit(exit_code(ConfigurationError()))
    path = Path(arguments[0])
    try:
        run = RunDir.open(path, int(os.environ.get("RANK", "0")))
        _prepare(run)
        main(run)
    except Exception as error:  # noqa: BLE001  the last frame: every failure becomes a file and a code
        _write_error(path, error)
        if not isinstance(error, PlumblineError):
            traceback.print_exc()
        else:
            print(f"{error.kind}: {error}", file=sys.stderr)
        code = exit_code(error)
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    # Peers may hang in a collective that this rank will not join; an ordinary exit would wait for them.
    os._exit(code)


def _prepare(run: RunDir) -> None:
    """Threads, seeds and determinism, before anything draws a random number."""
    import torch

    threads = run.config["params"].get("threads", 1)
    if not isinstance(threads, int) or threads < 1:
        raise ConfigurationError(f"params.threads must be a whole number >= 1, is {threads!r}")
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    seed_everything(run.seed)


def _write_error(path: Path, error: Exception) -> None:
    """First error wins: on several ranks the others only report that a neighbour left."""
    kind = error.kind if isinstance(error, PlumblineError) else "infrastructure"
    text = {"kind": kind, "message": str(error) or type(error).__name__, "traceback": traceback.format_exc()}
    target = path / "error.json"
    if path.is_dir() and not target.exists():
        write_json(target, text)
