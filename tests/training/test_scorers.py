from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.errors import ConfigurationError, InfrastructureError
from data.records import Message, Prompt
from training import advantages, lifeline
from training.rewards import ENSEMBLES
from training.scorers import (
    LARGEST,
    Answered,
    FunctionScorer,
    HttpScorer,
    LearnedScorer,
    Outcome,
    Tally,
    outcome_of,
)

FUNCTIONS = """
import ctypes, os, subprocess, sys, time

def length(prompt, answer, reference, extra):
    print("this is no reply")
    return len(answer) + len(prompt) + len(reference or "") + extra.get("more", 0)

def odd(prompt, answer, reference, extra):
    if answer == "none": return None
    if answer == "nan": return float("nan")
    if answer == "text": return "0.5"
    if answer == "raise": raise KeyError("the seventh row")
    if answer == "exit": sys.exit(3)
    if answer == "die": os._exit(7)
    if answer == "read": return len(sys.stdin.read())
    if answer == "sleep": time.sleep(60)
    if answer == "busy":
        while True: pass
    if answer == "c": ctypes.PyDLL(None).sleep(60)  # holds the lock: no thread, no signal runs
    if answer == "child":
        with open(extra["file"], "w") as file: file.write(str(subprocess.Popen(["sleep", "60"]).pid))
        time.sleep(60)
    return 1.0

def every_second(prompt, answer, reference, extra):
    if int(answer) % 2: raise RuntimeError("odd " + answer)
    return 0.0

class Loaded:
    def __init__(self): self.calls = 0
    def __call__(self, prompt, answer, reference, extra):
        self.calls += 1
        return self.calls
"""


def answered(text: str, **extra: Any) -> Answered:
    prompt = Prompt(
        prompt=(Message(role="user", content="q"),), id="1", group="1", reference="72", extra=extra
    )
    return Answered(prompt, text, len(text) + 1, True)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "mine"


Make = Callable[..., FunctionScorer]


@pytest.fixture
def make(module: str) -> Iterator[Make]:
    made: list[FunctionScorer] = []

    def build(name: str, timeout: float = 20.0, limit: float = 1.0) -> FunctionScorer:
        made.append(FunctionScorer("check", "quality", f"{module}:{name}", timeout, limit))
        return made[-1]

    yield build
    for scorer in made:
        scorer.close()


def test_a_function_sees_prompt_answer_reference_and_extra(make: Make) -> None:
    scorer = make("length")
    assert scorer.dimensions == ("quality",)
    assert scorer.score([answered("abc", more=10), answered("")]) == [
        (Outcome("score", 16.0),),
        (Outcome("score", 3.0),),
    ]
    assert scorer.tally.counts == {"score": 2, "invalid": 0, "error": 0}


def test_a_class_is_made_once(make: Make) -> None:
    outcomes = make("Loaded").score([answered("a"), answered("b")])
    assert [outcome.value for (outcome,) in outcomes] == [1.0, 2.0]


def test_no_failure_is_a_zero(make: Make) -> None:
    scorer = make("odd")
    names = ["none", "nan", "text", "raise", "exit", "die", "read", "ok"]
    outcomes = [outcome for (outcome,) in scorer.score([answered(name) for name in names])]
    assert [outcome.kind for outcome in outcomes] == ["invalid", *["error"] * 5, "score", "score"]
    messages = [outcome.message for outcome in outcomes]
    assert "finite" in messages[1] and "'0.5'" in messages[2]
    assert "KeyError: 'the seventh row'" in messages[3] and "Traceback" in messages[3]
    assert "SystemExit" in messages[4] and "exit code 7" in messages[5]
    assert outcomes[7].value == 1.0, "after a death the next call finds a fresh process"
    assert scorer.tally.counts == {"score": 2, "invalid": 1, "error": 5}
    assert scorer.tally.first_error == messages[1]


@pytest.mark.parametrize("how", ["sleep", "busy", "c"])
def test_the_time_limit_ends_a_call_whatever_it_does(make: Make, how: str) -> None:
    scorer = make("odd", timeout=0.5)
    began = time.monotonic()
    ((late,),) = scorer.score([answered(how)])
    assert time.monotonic() - began < 10 and late.kind == "error" and "killed after 0.5 s" in late.message
    scorer._timeout = 20.0
    assert scorer.score([answered("ok")]) == [(Outcome("score", 1.0),)]


def test_what_a_late_call_started_dies_with_it(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    make("odd", timeout=3.0).score([answered("child", file=str(file))])
    deadline = time.monotonic() + 10  # a killed process is gone when it is next scheduled
    while lifeline.start_of(int(file.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert lifeline.start_of(int(file.read_text())) == ""


def test_a_stopped_process_that_reads_nothing_is_late_too(make: Make) -> None:
    scorer = make("length", timeout=0.5)
    assert scorer._worker._process is not None
    os.kill(scorer._worker._process.pid, 19)
    ((outcome,),) = scorer.score([answered("x" * 1_000_000)])
    assert outcome.kind == "error" and "killed" in outcome.message


def test_the_limit_names_scorer_share_bound_and_the_first_traceback(make: Make) -> None:
    scorer = make("every_second", limit=0.1)
    with pytest.raises(InfrastructureError) as error:
        scorer.score([answered(str(number)) for number in range(64)])
    text = str(error.value)
    assert "scorer check" in text and "50%" in text and "error_limit = 0.1" in text
    assert "RuntimeError: odd 1" in text and "odd 3" not in text and "Traceback" in text
    assert sum(scorer.tally.counts.values()) == 6, (
        "it stops at the third failure of twenty, not after the batch"
    )


def test_few_failures_are_borne_and_a_late_break_is_not() -> None:
    tally = Tally("s", 0.1)
    good, bad = Outcome("score", 1.0), Outcome("error", message="x")
    for _ in range(40):
        for outcome in [bad] + [good] * 19:
            tally.add(outcome)
    assert tally.counts["error"] == 40
    with pytest.raises(InfrastructureError):
        for _ in range(30):
            tally.add(bad)
    strict = Tally("s", 0.0)
    strict.add(Outcome("invalid"))
    with pytest.raises(InfrastructureError):
        strict.add(bad)


@pytest.mark.parametrize("path", ["mine", "mine:nothing", "absent:length", "mine:time", "json:__version__"])
def test_a_path_without_a_callable_is_met_at_once(module: str, path: str) -> None:
    with pytest.raises(ConfigurationError, match="module:callable"):
        FunctionScorer("check", "quality", path, 5.0)


def test_the_process_needs_no_torch(tmp_path: Path) -> None:
    probe = "import sys; import training.worker, training.verify; sys.exit('torch' in sys.modules)"
    assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", probe) == 0


class Service(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        what = body["answer"]
        if what == "drip":
            self.send_response(200)
            self.end_headers()
            for _ in range(200):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.1)
            return
        reply: object = {"score": len(what) + len(body["prompt"]) + len(body["reference"])}
        reply = {"null": {"score": None}, "bare": 3, "word": {"score": "9"}}.get(what, reply)
        self.send_response(500 if what == "500" else 200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode() if what != "html" else b"<html>")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[str]:
    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass

    server = Quiet(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/score?key=geheim"
    server.shutdown()
    server.server_close()


def test_a_service_answers_or_fails(service: str) -> None:
    scorer = HttpScorer("judge", "safety", service, timeout=10.0)
    names = ["abcd", "null", "bare", "word", "500", "html"]
    outcomes = [outcome for (outcome,) in scorer.score([answered(name) for name in names])]
    assert [outcome.kind for outcome in outcomes] == ["score", "invalid", "error", "error", "error", "error"]
    assert outcomes[0].value == 7.0 and "HTTP Error 500" in outcomes[4].message
    scorer.close()


def test_a_service_that_drips_is_cut_at_the_limit_and_its_address_is_kept_quiet(service: str) -> None:
    scorer = HttpScorer("judge", "safety", service, timeout=1.0)
    began = time.monotonic()
    ((outcome,),) = scorer.score([answered("drip")])
    assert time.monotonic() - began < 8 and outcome.kind == "error"
    scorer._url = "http://127.0.0.1:9/?key=geheim"
    ((refused,),) = scorer.score([answered("x")])
    assert "refused" in refused.message and "geheim" not in refused.message + outcome.message
    scorer.close()


@pytest.mark.parametrize("url", ["file:///etc/passwd", "score", "http://", "https://me:geheim@host/"])
def test_an_address_must_be_one(url: str) -> None:
    with pytest.raises(ConfigurationError, match="judge") as error:
        HttpScorer("judge", "safety", url, 1.0)
    assert "geheim" not in str(error.value)


class Stub:
    """Stands for a score model: [members, rows, heads]."""

    def __init__(self, heads: tuple[str, ...], scores: Tensor) -> None:
        self.heads, self._scores, self.process = heads, scores, dict[str, str]()

    def score_members(self, rows: Any) -> Tensor:
        return self._scores[:, : len(rows)]


def test_a_learned_scorer_has_a_column_a_head_and_reduces_its_members() -> None:
    scores = torch.tensor([[[1.0, 5.0], [2.0, float("nan")]], [[3.0, 1.0], [4.0, 0.0]]])
    worst = LearnedScorer("rm", "quality", Stub(("quality", "safety"), scores), ENSEMBLES["worst"])  # type: ignore[arg-type]
    assert worst.dimensions == ("quality", "safety")
    first, second = worst.score([answered("a"), answered("b")])
    assert first == (Outcome("score", 1.0), Outcome("score", 1.0))
    assert second[0] == Outcome("score", 2.0) and second[1].kind == "error"
    single = LearnedScorer("rm", "quality", Stub((), scores[:, :, :1]), ENSEMBLES["mean"])  # type: ignore[arg-type]
    assert single.dimensions == ("quality",) and single.score([answered("a")]) == [(Outcome("score", 2.0),)]
    assert single.score([]) == []


@pytest.mark.parametrize("value", [1e39, -1e39, 1e16, 10**400, math.inf, math.nan])
def test_a_score_that_float32_can_not_square_is_an_error(value: float) -> None:
    outcome = outcome_of(value)
    assert outcome.kind == "error" and "within +-1e+15" in outcome.message


def test_the_largest_scores_still_teach() -> None:
    """Their group's deviation is finite, and so are the advantages."""
    assert outcome_of(-LARGEST) == Outcome("score", -LARGEST)
    score = torch.tensor([[-LARGEST, LARGEST, LARGEST, LARGEST]])
    found, _ = advantages.grpo(score, torch.ones(1, 4, dtype=torch.bool))
    assert bool(found.isfinite().all()) and found[0, 0] < -1
