"""Checkpoints from which a killed run goes on bit for bit.

A checkpoint is written into a hidden folder, audited, marked COMPLETE, synced and renamed: a reader finds
it whole or not at all. It belongs to one run (a fingerprint of its configuration), is found by number, not
by name or date, and holds every source of randomness, the counters that the program passes, the sizes of the
deterministic logs, and a checksum of each file: a damaged one is passed over for the one before it.

The last healthy one, to which a guard goes back, is never rotated away; nor is the best one by score, where
the program gives scores (training/rl.py: the reward on held-out prompts). Nothing goes back to the best by
itself: it is there for whoever looks at a run that went past its peak.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from data.errors import ConfigurationError, InfrastructureError
from training.engine import Engine
from training.rundir import RunDir, write_json

COMPLETE = "COMPLETE"
MARKER = {"step", "healthy", "score", "fingerprint", "offsets", "sizes", "sums"}
"""What a marker holds; one with less counts as torn."""


class Checkpoints:
    """Checkpoints of one run in WORKDIR/checkpoints; every rank calls the same methods."""

    def __init__(self, run: RunDir, engine: Engine, keep: int) -> None:
        self._run = run
        self._engine = engine
        self._keep = keep
        self._folder = run.path / "checkpoints"
        self._fingerprint = _fingerprint(run.config)

    def save(
        self, step: int, state: Mapping[str, Any], healthy: bool = True, score: float | None = None
    ) -> None:
        """Writes one. `state`: the program's counters, JSON or tensors. `score`: higher is better, held
        out."""
        name = f"step-{step:08d}"
        unfinished = self._folder / f".{name}.unfinished"
        if self._engine.first:
            self._folder.mkdir(parents=True, exist_ok=True)
            for old in self._folder.glob(".*.unfinished"):
                shutil.rmtree(old)
            self._require_space()
            unfinished.mkdir()
        self._engine.barrier()
        self._engine.save(unfinished)
        torch.save(_randomness(), unfinished / f"random-{self._engine.process}.pt")
        self._engine.barrier()
        if self._engine.first:
            torch.save(dict(state), unfinished / "state.pt")
            self._seal(unfinished, step, healthy, score)
            shutil.rmtree(self._folder / name, ignore_errors=True)
            unfinished.rename(self._folder / name)
            _sync(self._folder)
            self._rotate()
        self._engine.barrier()

    def rate(self, step: int, score: float | None) -> None:
        """Gives the checkpoint of a step the score that was not known when it was written; does nothing when
        it is gone. What is decided by scores is which checkpoints stay, never where a run goes on."""
        for marker in self._complete() if self._engine.first else ():
            if marker["step"] == step:
                write_json(self._path(marker) / COMPLETE, {**marker, "score": score})
        self._engine.barrier()

    def _seal(self, folder: Path, step: int, healthy: bool, score: float | None) -> None:
        """Audits every file and writes the marker last."""
        sizes, sums = {}, {}
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            if file.suffix == ".pt":
                _audit(file, self._engine)
            _sync(file)
            name = file.relative_to(folder).as_posix()
            sizes[name], sums[name] = file.stat().st_size, _checksum(file)
        marker = {
            "step": step,
            "healthy": healthy,
            "score": score,
            "fingerprint": self._fingerprint,
            "offsets": self._run.offsets(),
            "sizes": sizes,
            "sums": sums,
        }
        (folder / COMPLETE).write_text(json.dumps(marker, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        _sync(folder / COMPLETE)

    def resume(self) -> tuple[int, dict[str, Any]] | None:
        """Goes back to the newest complete checkpoint whose logs are whole: engine, randomness, logs; None
        when there is none yet. ConfigurationError when it was written by another number of ranks, or when
        lines of the logs are lost that all checkpoints have seen."""
        complete, lost = self._complete(), ""
        for marker in reversed(complete):
            if self._undamaged(marker):
                lost = self._run.lost(marker["offsets"])
                if not lost:
                    return self._load(marker)
                print(f"{self._path(marker)}: {lost}; an earlier checkpoint is looked for", flush=True)
        if lost:
            raise ConfigurationError(
                f"{self._folder}: {lost}, and no earlier checkpoint is left: a run that went on would have a "
                "gap in its logs; put the file back, or remove the run's work folder to start anew"
            )
        strangers = len(list(self._folder.glob("step-*"))) - len(complete)
        if strangers and not complete:
            print(
                f"{self._folder}: {strangers} checkpoints are of another configuration, or torn; the run "
                "starts anew, and they go when it writes its own",
                flush=True,
            )
        self._run.rewind({})
        return None

    def rollback(self) -> tuple[int, dict[str, Any]] | None:
        """Goes back to the last healthy checkpoint and removes the later ones; the logs go on, nothing is
        hidden."""
        healthy = (marker for marker in reversed(self._complete()) if marker["healthy"])
        marker = next(filter(self._undamaged, healthy), None)
        if marker is None:
            return None
        loaded = self._load(marker, rewind=False)
        if self._engine.first:
            for marker in self._complete():
                if marker["step"] > loaded[0]:
                    shutil.rmtree(self._path(marker))
        self._engine.barrier()
        return loaded

    def _load(self, marker: Mapping[str, Any], rewind: bool = True) -> tuple[int, dict[str, Any]]:
        folder = self._path(marker)
        self._engine.load(folder)
        state = torch.load(folder / "state.pt", weights_only=False)
        _restore(torch.load(folder / f"random-{self._engine.process}.pt", weights_only=False))
        if rewind:
            self._run.rewind(marker["offsets"])
        self._run.timing(marker["step"], {"resumed": "restart" if rewind else "rollback"})
        return int(marker["step"]), dict(state)

    def _complete(self) -> list[dict[str, Any]]:
        """Markers of this run's whole checkpoints, by step."""
        markers = []
        for folder in self._folder.glob("step-*"):
            try:
                marker = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
                whole = all(
                    (folder / name).is_file() and (folder / name).stat().st_size == size
                    for name, size in marker["sizes"].items()
                )
                whole = whole and set(marker) >= MARKER
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
            if whole and marker["fingerprint"] == self._fingerprint:
                markers.append(marker)
        return sorted(markers, key=lambda marker: int(marker["step"]))

    def _undamaged(self, marker: Mapping[str, Any]) -> bool:
        """Whether every file reads as it was written; one that does not is told, and passed over."""
        folder = self._path(marker)
        for name, wanted in marker["sums"].items():
            if _checksum(folder / name) != wanted:
                self._run.timing(marker["step"], {"damaged": name})
                print(
                    f"{folder / name}: changed since it was written; an earlier checkpoint is taken",
                    flush=True,
                )
                return False
        return True

    def _path(self, marker: Mapping[str, Any]) -> Path:
        return self._folder / f"step-{marker['step']:08d}"

    def _rotate(self) -> None:
        """Keeps the newest `keep`, the last healthy and the best; strangers and torn folders go too."""
        complete = self._complete()
        kept = {marker["step"] for marker in complete[-self._keep :]}
        kept |= {marker["step"] for marker in [m for m in complete if m["healthy"]][-1:]}
        scored = [marker for marker in complete if marker["score"] is not None]
        kept |= (
            {max(scored, key=lambda marker: (marker["score"], marker["step"]))["step"]} if scored else set()
        )
        names = {f"step-{step:08d}" for step in kept}
        for folder in self._folder.glob("step-*"):
            if folder.name not in names:
                shutil.rmtree(folder)

    def _require_space(self) -> None:
        """Asks for twice the last checkpoint (or the trained weights with their optimizer state) before
        writing."""
        complete = self._complete()
        if complete:
            needed = 2 * sum(complete[-1]["sizes"].values())
        else:
            trained = [p for p in self._engine.module.parameters() if p.requires_grad]
            needed = 2 * 3 * sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in trained)
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise InfrastructureError(
                f"{self._folder}: {free >> 20} MiB free, a checkpoint asks for {needed >> 20} MiB; "
                "free some space and run again: the run goes on from its last checkpoint"
            )


def _fingerprint(config: Mapping[str, Any]) -> str:
    """What makes a checkpoint this run's: stage, program, parameters, seed and inputs. Not the number of
    ranks: `Engine.load` compares it, so that another one is refused and not taken for another run."""
    params = dict(config["params"])
    params.pop("processes", None)
    if isinstance(params.get("engine"), Mapping):
        params["engine"] = {k: v for k, v in params["engine"].items() if k != "tensor_parallel"}
    config = {**config, "params": params}
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _randomness() -> dict[str, Any]:
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.accelerator.is_available():
        state["accelerator"] = torch.get_device_module().get_rng_state()
    return state


def _restore(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "accelerator" in state:
        torch.get_device_module().set_rng_state(state["accelerator"])


def _audit(file: Path, engine: Engine) -> None:
    """Reads a file back: no non-finite number in any tensor, and the weights are the trained ones."""
    state = torch.load(file, map_location="cpu", weights_only=False)
    for tensor in _tensors(state):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise InfrastructureError(f"{file}: holds a non-finite number; the checkpoint was not kept")
    fault = engine.unlike(state)
    if fault:
        raise InfrastructureError(
            f"{file}: read back, {fault}; the checkpoint was not kept: the disk may be full or failing"
        )


def _checksum(file: Path) -> int:
    """CRC-32 of a file."""
    found = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            found = zlib.crc32(block, found)
    return found


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for part in value.values() for tensor in _tensors(part)]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    return []


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
