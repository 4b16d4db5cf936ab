"""A training program without training: steps, metrics, checkpoints, a model; FAKE says how it goes wrong."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from training import lifeline

STEPS = 8


def main(work: Path) -> None:
    mode = os.environ.get("FAKE", "")
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number) if mode != "deaf" else None)
    (work / "pids").write_text(f"{os.getppid()} {os.getpid()}")
    checkpoint = work / "checkpoints" / "last"
    start = int(checkpoint.read_text()) if checkpoint.exists() else 0
    with (work / "starts").open("a") as starts:
        starts.write(f"{start}\n")
    metrics = work / "metrics.jsonl"
    lines = metrics.read_text().splitlines()[:start] if metrics.exists() else []
    metrics.write_text("".join(f"{line}\n" for line in lines))
    for step in range(start + 1, STEPS + 1):
        time.sleep(float(os.environ.get("FAKE_STEP", "0.05")))
        with metrics.open("a") as stream:
            stream.write(json.dumps({"step": step, "loss": 1 / step, "note": "text"}) + "\n")
        (work / "progress.json").write_text(json.dumps({"step": step, "total": STEPS, "unit": "step"}))
        if mode == "divergence" and step == 3:
            error = {"kind": "divergence", "message": "loss is nan at step 3", "traceback": ""}
            (work / "error.json").write_text(json.dumps(error))
            sys.exit(12)
        if mode == "crash" and step == 3:
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 2 == 0:
            checkpoint.parent.mkdir(exist_ok=True)
            checkpoint.write_text(str(step))
        while mode == "hold" and step == 5 and not stop:
            time.sleep(0.05)
        if stop:
            sys.exit(14)
    (work / "journal.jsonl").write_text("")
    (work / "model").mkdir(exist_ok=True)
    (work / "model" / "weights").write_bytes(b"w" * 1000)
    (work / "result.json").write_text(
        json.dumps(
            {
                "status": "trained",
                "digest": "d",
                "loss_last": 1 / STEPS,
                "accuracy": 0.75,
                "interval": [0.5, 0.9],
                "lengths": {"accuracy": 0.6},
            }
        )
    )


if __name__ == "__main__":
    lifeline.bind(0.1)
    main(Path(sys.argv[-1]))
