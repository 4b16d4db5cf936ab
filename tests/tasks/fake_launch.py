"""A launcher without torch: starts the program in a session of its own, as torchrun does with its workers."""

from __future__ import annotations

import signal
import subprocess
import sys

from training import lifeline

if __name__ == "__main__":
    lifeline.bind(0.1)
    module = sys.argv[sys.argv.index("-m") + 1]
    with subprocess.Popen([sys.executable, "-m", module, sys.argv[-1]], start_new_session=True) as worker:
        signal.signal(signal.SIGTERM, lambda number, frame: worker.send_signal(number))
        code = worker.wait()
    raise SystemExit(code if code >= 0 else 13)
