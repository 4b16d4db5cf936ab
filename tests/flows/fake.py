"""A stage that only pretends: status file, progress, and an end as `plan.json` says. Run by dvc in a test.

plan.json: {"STAGE": {"steps": 3, "seconds": 0.05, "fail": "data" | "", "times": 1, "die": false,
"deaf": false}}
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from data.errors import EXIT_CODES
from tasks import process
from tasks.status import Status


def main() -> int:
    """One pretended stage."""
    process.bind()
    name = sys.argv[1]
    project = Path.cwd()
    plan = json.loads((project / "plan.json").read_text()).get(name, {})
    status = Status(project, name)
    log = project / "log.txt"
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)

    signal.signal(signal.SIGTERM, stop)
    with log.open("a") as file:
        file.write(f"{name} start {time.time()}\n")
    steps = plan.get("steps", 2)
    for step in range(1, steps + 1):
        time.sleep(plan.get("seconds", 0.02))
        status.metrics({"loss": 1.0 / step})
        status.update(progress={"step": step, "total": steps, "unit": "step"})
        if stopped and not plan.get("deaf"):
            with log.open("a") as file:
                file.write(f"{name} checkpoint\n")
            status.update(state="failed", kind="stopped", message="stopped at a checkpoint")
            return EXIT_CODES["stopped"]
    tries = project / f"tries-{name}"
    done = int(tries.read_text()) if tries.exists() else 0
    tries.write_text(str(done + 1))
    kind = plan.get("fail", "")
    if kind and done < plan.get("times", 99):
        if plan.get("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        status.update(
            state="failed", kind=kind, message=f"{name} can not do it: {os.environ.get('MY_TOKEN', '')}"
        )
        return EXIT_CODES[kind]  # type: ignore[no-any-return]
    out = project / "data" / "stages" / name
    out.mkdir(parents=True, exist_ok=True)
    (out / "result.json").write_text(json.dumps({"stage": name, "value": plan.get("value", 0)}))
    with log.open("a") as file:
        file.write(f"{name} end {time.time()}\n")
    status.update(state="done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
