"""Starts a training program on one or several ranks: `python -m training.launch --processes N -m
training.sft WORKDIR`.

torchrun's agent runs in this process (loopback rendezvous on a free port, no restart: a failed stage
resumes from its checkpoint when it is run again); with a hostfile the deepspeed launcher takes over. The
exit code is the program's own, by kind of failure. A stop signal is passed on to the workers, which
checkpoint and leave; the agent's own handlers are kept from ending them after 30 seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType

from data.errors import EXIT_CODES, ConfigurationError, exit_code
from training import lifeline

ALLOCATOR = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.arena_max=1:"
    "glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=67108864",
}
"""Environment of a process whose tensors shall lie in huge pages (torch's variable and glibc's) and whose
freed memory stays with it. A training step makes and drops gigabytes: touching them page by page took a sixth
of its time, and the system's clearing them anew at each step up to two fifths (infra/LOG.md)."""
_stopped = threading.Event()
"""Set once a stop signal came: a worker that it met before its handlers were there has not failed."""


def main(arguments: list[str] | None = None) -> int:
    """Binds this process, runs the program on all ranks, returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m training.launch")
    parser.add_argument("--processes", type=int, default=1, help="ranks on this machine")
    parser.add_argument("--hostfile", type=Path, help="several machines: the deepspeed launcher's host file")
    parser.add_argument("-m", dest="module", required=True, help="program, e.g. training.sft")
    parser.add_argument("workdir", type=Path)
    options = parser.parse_args(arguments)
    lifeline.bind()
    if options.processes < 1:
        print(f"--processes must be >= 1, is {options.processes}", file=sys.stderr)
        return exit_code(ConfigurationError())
    if not options.workdir.is_dir():
        print(f"{options.workdir}: no such work folder; name one with a config.json", file=sys.stderr)
        return exit_code(ConfigurationError())
    _forward_stop_signals()
    _environment()
    if options.hostfile:
        return _deepspeed(options.hostfile, options.module, options.workdir)
    return _torchrun(options.processes, options.module, options.workdir)


def _forward_stop_signals() -> None:
    """Workers decide when to leave; the agent sees them end and ends too. Without workers there is nothing
    to save."""

    def forward(number: int, frame: FrameType | None) -> None:
        _stopped.set()
        workers = lifeline.children(os.getpid())
        for pid in workers:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        if not workers:
            os._exit(EXIT_CODES["stopped"])

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)


def _environment() -> None:
    """What the workers find, unless it is set already. Threads are a parameter of the program; without the
    variable torchrun prints a banner about them."""
    for name, value in {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **ALLOCATOR}.items():
        os.environ.setdefault(name, value)


def _torchrun(processes: int, module: str, workdir: Path) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    # The stop signals are forwarded here; the agent's own handler would end the workers after 30 seconds.
    agent = ["--max-restarts", "0", "--signals-to-handle", "SIGHUP"]
    # The agent's logs stay empty; by default each launch would leave a folder for them in the system's own.
    with tempfile.TemporaryDirectory(prefix=".elastic-", dir=workdir, ignore_cleanup_errors=True) as logs:
        own = ["--nproc-per-node", str(processes), "--log-dir", logs]
        try:
            run(get_args_parser().parse_args([*own, *rendezvous, *agent, "-m", module, str(workdir)]))  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            return _failure(workdir, [failure.exitcode for failure in error.failures.values()])
    return 0


def _failure(workdir: Path, codes: list[int]) -> int:
    """The kind in error.json, else the lowest known code; a signal leaves neither and is infrastructure."""
    with contextlib.suppress(OSError, json.JSONDecodeError, KeyError):
        return EXIT_CODES[json.loads((workdir / "error.json").read_text(encoding="utf-8"))["kind"]]
    if _stopped.is_set():
        return EXIT_CODES["stopped"]
    known = sorted(code for code in codes if code in EXIT_CODES.values())
    return known[0] if known else EXIT_CODES["infrastructure"]


def _deepspeed(hostfile: Path, module: str, workdir: Path) -> int:
    if not hostfile.is_file():
        print(f"--hostfile {hostfile} does not exist", file=sys.stderr)
        return exit_code(ConfigurationError())
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile)]
    with subprocess.Popen([*launcher, "--module", module, str(workdir)]) as process:
        code = process.wait()
    return 0 if code == 0 else _failure(workdir, [code])


if __name__ == "__main__":
    raise SystemExit(main())
