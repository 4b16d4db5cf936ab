"""A Python callable in a process of its own, which can be killed: no call outlasts its time.

A time limit inside the caller's process can't end a busy loop, let alone one in C, and an alarm signal works
in the main thread only. Here the limit is the reader's: what has not answered in time is killed with all
that it started, and the next call finds a fresh process. Requests and replies are lines of JSON over pipes;
what the callable prints goes to standard error, and its standard input is empty.

A class is instantiated once, without arguments, so that it may load what it needs before the clock runs. No
torch is imported here: a process is ready in a moment.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from typing import IO, Any

from data.errors import ConfigurationError
from training import lifeline

START_SECONDS = 120.0
"""For imports and construction; the time limit of a call does not cover them."""
LONGEST_ERROR = 8000
"""Characters of a traceback that are kept, its end."""
LARGEST_REPLY = 1 << 20
"""Bytes of a service's reply."""


class Failed(Exception):
    """A call gave no value; the text says why, with the traceback where the callable raised."""


class Worker:
    """Owns the process of one callable; `call` it from one thread."""

    def __init__(self, path: str) -> None:
        """Starts it, so that a path without a callable is met before anything is trained."""
        self.path = path
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        try:
            self._start()
        except Failed as error:
            raise ConfigurationError(
                f"{path}: can't be called, expected module:callable ({error})"
            ) from error

    def call(self, arguments: list[Any], seconds: float) -> float | None:
        """What the callable returns for these arguments; `Failed` when it raises, dies or is too late."""
        if self._process is None:
            self._start()
        try:
            reply = self._exchange(json.dumps(arguments).encode() + b"\n", seconds)
        except TimeoutError:
            self.close()
            raise Failed(f"{self.path}: killed after {seconds:g} s") from None
        if "error" in reply:
            raise Failed(str(reply["error"]))
        value: float | None = reply["value"]
        return value

    def _start(self) -> None:
        watched = [os.environ.get(lifeline.WATCH, ""), lifeline.watch_value(os.getpid())]
        environment = {**os.environ, lifeline.WATCH: ",".join(filter(None, watched))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "training.worker", self.path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
        )  # fmt: skip
        for pipe in self._pipes():
            os.set_blocking(pipe.fileno(), False)
        try:
            reply = self._exchange(b"", START_SECONDS)
        except TimeoutError:
            self.close()
            raise Failed(f"not ready within {START_SECONDS:g} s") from None
        if "error" in reply:
            self.close()
            raise Failed(str(reply["error"]))

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process is not None and self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout

    def _exchange(self, request: bytes, seconds: float) -> dict[str, Any]:
        """Writes a line and reads one, both within the time: a process that has stopped reads nothing."""
        to, back = self._pipes()
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(back, selectors.EVENT_READ)
            if request:
                selector.register(to, selectors.EVENT_WRITE)
            while b"\n" not in self._rest:
                ready = selector.select(max(0.0, until - time.monotonic()))
                if not ready:
                    raise TimeoutError
                for key, _ in ready:
                    if key.fileobj is to:
                        request = self._write(to, request)
                        if not request:
                            selector.unregister(to)
                    else:
                        self._rest += self._read(back)
        line, _, self._rest = self._rest.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _write(self, to: IO[bytes], request: bytes) -> bytes:
        try:
            return request[os.write(to.fileno(), request) :]
        except BrokenPipeError:
            return b""  # the read that follows meets its end

    def _read(self, back: IO[bytes]) -> bytes:
        part = os.read(back.fileno(), 1 << 16)
        if not part:
            assert self._process is not None
            code = self._process.wait()
            self.close()
            raise Failed(f"{self.path}: its process ended in the call (exit code {code})")
        return part

    def close(self) -> None:
        """Kills the process and what it started; the next call starts another."""
        if self._process is None:
            return
        # Stopped, it starts nothing more; its children first: once it is gone, nobody knows whose they were.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGSTOP)
        for pid in [*lifeline.descendants(self._process.pid), self._process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        for pipe in self._pipes():
            with contextlib.suppress(OSError):
                pipe.close()
        self._process, self._rest = None, b""


def post(url: str, body: dict[str, Any], seconds: float) -> object:
    """`score` of a service's reply to a POST of JSON."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=seconds) as response:
        reply = json.loads(response.read(LARGEST_REPLY))
    if not isinstance(reply, dict) or "score" not in reply:
        raise ValueError("the reply is no JSON object with a key 'score'")
    return reply["score"]


def resolve(path: str) -> Callable[..., object]:
    """The callable behind `module:name`; of a class an instance."""
    module, colon, name = path.partition(":")
    if not colon:
        raise ValueError(f"{path!r} has no colon")
    found = getattr(importlib.import_module(module), name)
    made = found() if isinstance(found, type) else found
    if not callable(made):
        raise TypeError(f"{path!r} is a {type(made).__name__}")
    function: Callable[..., object] = made
    return function


def number_of(value: object) -> float | None:
    """A returned value as a number (NumPy's and torch's too); text that looks like one is none."""
    if value is None:
        return None
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"it returned {value!r:.200}; expected a number or None")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}; expected a finite number or None")
    return number


def serve(path: str) -> None:
    """The process: a request a line in, a reply a line out, until the pipe closes."""
    lifeline.bind()
    # Ctrl-C reaches the whole group; the trainer decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)

    def reply(call: Callable[[], object]) -> None:
        try:
            text = json.dumps({"value": call()})
        except BaseException:  # noqa: BLE001  SystemExit too: whatever it raises is an outcome, not our end
            text = json.dumps({"error": traceback.format_exc()[-LONGEST_ERROR:]})
        replies.write(text.encode() + b"\n")
        replies.flush()

    functions: list[Callable[..., object]] = []
    reply(lambda: functions.append(resolve(path)))
    for line in requests:
        arguments = json.loads(line)
        reply(lambda: number_of(functions[0](*arguments)))  # noqa: B023  called at once


if __name__ == "__main__":
    serve(sys.argv[1])
