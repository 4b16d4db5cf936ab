"""A side is a process of its own, which does a step when it is told to: the process, and the pipes to it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from infra.bench.ours import OURS
from infra.bench.theirs import run_trl
from infra.bench.work import decoding
from training.launch import ALLOCATOR


def peak_mb() -> float:
    """Peak resident memory of this process so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def serve(spec: dict[str, Any]) -> None:
    """One side: says that it is ready, then does a step a line of standard input."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes to the log

    def say(**values: Any) -> None:
        out.write(json.dumps(values) + "\n")
        out.flush()

    import torch

    from training.chat import load_tokenizer
    from training.engine import connect
    from training.rundir import seed_everything

    torch.set_num_threads(spec["threads"])
    seed_everything(0)
    tok = load_tokenizer(spec["model"])
    ready = False

    def turn() -> None:
        nonlocal ready
        if not ready:
            say(ready=True)
            ready = True
        if not sys.stdin.readline():
            raise SystemExit(0)

    def reply(seconds: float, loss: float, tokens: int) -> None:
        decode = decoding[-1] if decoding else None
        say(seconds=seconds, loss=loss, tokens=tokens, peak=peak_mb(), decode=decode)

    if spec["side"] == "trl":
        import trl  # noqa: F401

        run_trl(spec, tok, turn, reply)
    else:
        connect()
        step = OURS[spec["task"]](spec, tok)
        for number in range(spec["steps"]):
            turn()
            reply(*step(number))
    out.close()
    os._exit(0)


def tiny_model(folder: Path) -> str:
    """A random model with a token a byte."""
    from tests.training.tiny import byte_tokenizer, llama

    llama(0, max_position_embeddings=1024).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def prepare(spec: dict[str, Any]) -> None:
    """In a process of its own: the tiny model where none is given, its size, and the machine's two peaks."""
    import torch

    folder = Path(spec["model"])
    if not folder.exists():
        tiny_model(folder)
    from training.models import load_causal

    torch.set_num_threads(spec["threads"])
    model = load_causal(folder, torch.float32)
    inner = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "embed" not in name and "wte" not in name and "wpe" not in name and "lm_head" not in name
    )
    size = 1024
    peaks = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        if name not in spec["precisions"]:
            continue
        left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
        times = []
        for _ in range(6):
            began = time.perf_counter()
            left @ right
            times.append(time.perf_counter() - began)
        peaks[name] = 2 * size**3 / min(times)
    read = torch.randn(2**27)  # half a GB, which no cache holds
    times = []
    for _ in range(4):
        began = time.perf_counter()
        read.sum()
        times.append(time.perf_counter() - began)
    bandwidth = read.numel() * 4 / min(times)
    whole = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"weights": inner, "whole": whole, "peaks": peaks, "bandwidth": bandwidth}))


class Side:
    """One process and the pipes to it."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.log = Path(spec["folder"]) / f"{spec['side']}-{spec['task']}-{spec['precision']}.log"
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "infra.bench", "--serve", json.dumps(spec)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=environment(spec["side"]),
            )  # fmt: skip
        self.read()

    def read(self) -> dict[str, Any]:
        """The next thing that it says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            end = self.log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise RuntimeError(f"ended early ({self.process.wait()}):\n{end}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def step(self) -> dict[str, Any]:
        """Has it do one step."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.wait()


def environment(side: str = "") -> dict[str, str]:
    """CPU only, and no network; ours have the allocator's settings that the launcher gives its programs.
    Exported in the shell, they reach both sides."""
    return {
        **(ALLOCATOR if side == "ours" else {}),
        **os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1",
    }  # fmt: skip
