"""A stand-in for vLLM on the CPU: its LLM class and its server, answering with the built-in generator on a
tiny model, with the real worker extension mixed into the worker. What it can do wrong is set by attributes.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from training.generate import BuiltinGenerator
from training.models import load_causal
from training.vllm_worker import WeightReceiver


class Runner:
    """vLLM's model runner, as far as the extension reaches."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def get_model(self) -> Any:
        return self.model


class Worker(WeightReceiver):
    """A worker with the extension mixed in."""

    deaf = False
    """True: loads nothing, and says nothing of it."""

    def __init__(self, folder: Path) -> None:
        self.model_runner = Runner(load_causal(folder, torch.float32).eval())
        self.loads: list[int] = []

    def reload_weights(self, weights_iterator: Iterable[tuple[str, Tensor]]) -> None:
        weights = dict(weights_iterator)
        self.loads.append(len(weights))
        if not self.deaf:
            result = self.model_runner.model.load_state_dict(
                {name: tensor.float() for name, tensor in weights.items()}, strict=False
            )
            assert not result.unexpected_keys and set(result.missing_keys) <= {"lm_head.weight"}


class Engine:
    """Worker and sampler; `asked` keeps what was sampled."""

    def __init__(self, folder: Path) -> None:
        self.worker = Worker(folder)
        self.asked: list[dict[str, Any]] = []
        self.skew = 0.0
        """Added to each log-probability: another kernel."""
        self.end: str | None = None
        """A finish reason that is none of the two."""

    def sample(self, prompt: list[int], sampling: dict[str, Any]) -> list[dict[str, Any]]:
        self.asked.append({"prompt": prompt, **sampling})
        stops = sampling["stop_token_ids"]
        made = BuiltinGenerator(self.worker.model_runner.model, stops, stops[0]).generate(
            [prompt], sampling["n"], max_new_tokens=sampling["max_tokens"],
            temperature=sampling["temperature"], seed=sampling["seed"],
        )  # fmt: skip
        return [
            {
                "index": index, "token_ids": ids, "logp": [value + self.skew for value in logp],
                "finish_reason": self.end or ("stop" if ids[-1] in stops else "length"),
            }
            for index, (ids, logp) in enumerate(zip(made.answers[0], made.logp[0], strict=True))
        ]  # fmt: skip

    @torch.no_grad()
    def read(self, ids: list[int]) -> list[float | None]:
        logits = self.worker.model_runner.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        rest = logits[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        return [None, *[float(value) + self.skew for value in rest]]


# -- in the process ------------------------------------------------------------------------------------------


def module(made: list[Any]) -> ModuleType:
    """A module `vllm`; its LLM objects are put into `made`."""

    class LLM:
        def __init__(self, model: str, **settings: Any) -> None:
            self.settings, self.asleep, self.calls = settings, False, []
            self.engine = Engine(Path(model))
            made.append(self)

        def sleep(self, level: int) -> None:
            self.asleep = True
            self.calls.append(f"sleep {level}")

        def wake_up(self) -> None:
            self.asleep = False
            self.calls.append("wake")

        def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
            assert not self.asleep, "its weights are not on the device"
            return [getattr(self.engine.worker, method)(*args)]

        def generate(self, prompts: list[Any], sampling: list[Any] | Any, use_tqdm: bool) -> list[Any]:
            assert not self.asleep, "its weights are not on the device"
            each = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
            return [self._one(p["prompt_token_ids"], s.settings) for p, s in zip(prompts, each, strict=True)]

        def _one(self, ids: list[int], settings: dict[str, Any]) -> Any:
            if "prompt_logprobs" in settings:
                line = [
                    None if value is None else {token: SimpleNamespace(logprob=value)}
                    for token, value in zip(ids, self.engine.read(ids), strict=True)
                ]
                return SimpleNamespace(prompt_logprobs=line)
            outputs = [
                SimpleNamespace(
                    index=one["index"], token_ids=tuple(one["token_ids"]), finish_reason=one["finish_reason"],
                    logprobs=[
                        {token: SimpleNamespace(logprob=value), 0: SimpleNamespace(logprob=value)}
                        for token, value in zip(one["token_ids"], one["logp"], strict=True)
                    ],
                )
                for one in self.engine.sample(ids, settings)
            ]  # fmt: skip
            return SimpleNamespace(outputs=outputs[::-1])

    class SamplingParams:
        def __init__(self, **settings: Any) -> None:
            self.settings = settings

    found = ModuleType("vllm")
    found.LLM, found.SamplingParams = LLM, SamplingParams  # type: ignore[attr-defined]
    return found


# -- over HTTP -----------------------------------------------------------------------------------------------


class Api:
    """What the server's handler reads and tests change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version = "0.30.0"
        self.delay = 0.0
        self.statuses: dict[str, int] = {}
        """Paths that are refused, with their HTTP status."""
        self.keys: set[str | None] = set()
        self.files: list[str] = []
        self.bare = False
        """True: replies lack token ids."""
        self.restart()

    def restart(self) -> None:
        """As it was started: the folder's weights, no version."""
        self.engine = Engine(self.folder)

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/version":
            return {"version": self.version}
        if path == "/collective_rpc":
            self.files += [argument for argument in body["args"] if isinstance(argument, str)]
            return {"results": [getattr(self.engine.worker, body["method"])(*body["args"])]}
        assert path == "/v1/completions"
        time.sleep(self.delay)
        ids = body["prompt"]
        if "prompt_logprobs" in body:
            line = [
                None if value is None else {str(token): {"logprob": value}}
                for token, value in zip(ids, self.engine.read(ids), strict=True)
            ]
            return {"choices": [{"prompt_logprobs": line}]}
        choices = [
            {
                "index": one["index"], "finish_reason": one["finish_reason"], "text": "",
                "logprobs": {"token_logprobs": one["logp"]},
                "token_ids": None if self.bare else one["token_ids"],
            }
            for one in self.engine.sample(ids, body)
        ]  # fmt: skip
        return {"choices": choices[::-1]}


@contextmanager
def server(folder: Path) -> Iterator[tuple[str, Api]]:
    """A server on loopback; its address and what steers it."""
    api, lock = Api(folder), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: dict[str, Any]) -> None:
            api.keys.add(self.headers["Authorization"])
            status = api.statuses.get(self.path, 200)
            with lock:
                reply = api.answer(self.path, body) if status == 200 else {"error": "it says no"}
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}", api
    finally:
        http.shutdown()
        http.server_close()


def letters(prompt: list[dict[str, str]], answer: str, reference: str | None, extra: dict[str, Any]) -> float:
    """A reward: different letters of an answer."""
    return float(len(set(answer)))
