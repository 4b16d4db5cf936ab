"""The two ways to vLLM: an engine in this process on the trainer's own devices, or a server that the user
started.

Both take weights through the same worker extension (training/vllm_worker.py): the engine in place, the server
from a safetensors file in a folder that both see. No NCCL group between trainer and server: its world would
have to be built anew after every restart of either, a file is there or it is not.

Answers are drawn from the full softmax at T (no top-k, top-p, min-p, penalties; what a model's
generation_config.json says is overridden), their log-probabilities are those of that very distribution
(`logprobs_mode: processed_logprobs`), a prompt is sent once and sampled `n` times. `cache_salt` names the
weights, so a prompt's cache of older ones is never read.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from data.errors import ConfigurationError, InfrastructureError
from training.vllm_worker import Report

EXTENSION = "training.vllm_worker.WeightReceiver"
SERVE = (
    "VLLM_SERVER_DEV_MODE=1 PYTHONPATH=. vllm serve MODEL --worker-extension-cls training.vllm_worker."
    "WeightReceiver --logprobs-mode processed_logprobs"
)
KEY = "VLLM_API_KEY"
"""Environment variable that holds the server's key, as vLLM's own."""


@dataclass(frozen=True)
class Asked:
    """One prompt, sampled `group` times from `seed` on."""

    prompt: list[int]
    group: int
    seed: int
    temperature: float
    max_new_tokens: int
    stops: list[int]
    salt: str

    def sampling(self) -> dict[str, Any]:
        """What SamplingParams and the completions API call alike."""
        return {
            "n": self.group, "seed": self.seed, "temperature": self.temperature,
            "max_tokens": self.max_new_tokens, "stop_token_ids": self.stops, "ignore_eos": True,
            "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0, "logprobs": 1,
        }  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One answer: ids, EOS included where it was met, and the log-probability of each."""

    ids: list[int]
    logp: list[float]
    reason: str | None
    """vLLM's finish reason: stop, length, or what else ended it."""


class Link(Protocol):
    """What `VllmGenerator` asks of either."""

    once: bool
    """True: one load by rank 0 serves all ranks."""

    def load(self, items: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Hands new weights over."""
        ...

    def reports(self) -> list[Report]:
        """Of each worker: which weights it has."""
        ...

    def complete(self, asked: Sequence[Asked]) -> list[list[Sample]]:
        """Answers, in order of prompts and samples."""
        ...

    def score(self, texts: Sequence[list[int]], salt: str) -> list[list[float]]:
        """Log-probability of each token but the first, at temperature 1."""
        ...

    def rest(self) -> None:
        """Nothing is asked for a while."""
        ...


class Colocated:
    """vLLM's LLM object in this process, one a rank; asleep while the trainer works."""

    once = False

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        max_length: int,
        memory_share: float,
        sleep: bool,
        seed: int,
    ) -> None:
        """`memory_share`: of the device's memory, for vLLM's weights and cache; `max_length`: tokens."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
            os.environ.setdefault(name, value)
        import vllm

        self._vllm: Any = vllm
        self._sleep, self._asleep = sleep, False
        # The engine joins the launcher's process group; with tensor parallel size 1 each rank is on its own.
        self._llm = vllm.LLM(
            model=str(folder), dtype=str(dtype).removeprefix("torch."), seed=seed, max_model_len=max_length,
            gpu_memory_utilization=memory_share, enable_sleep_mode=sleep, generation_config="vllm",
            logprobs_mode="processed_logprobs", worker_extension_cls=EXTENSION, tensor_parallel_size=1,
            distributed_executor_backend="external_launcher",
        )  # fmt: skip
        self.rest()

    def _wake(self) -> Any:
        if self._asleep:
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()
            self._llm.wake_up()
            self._asleep = False
        return self._llm

    def load(self, items: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `Link`; the tensors are handed over as they are."""
        self._wake().collective_rpc("plumbline_load", args=(items, version))

    def reports(self) -> list[Report]:
        """See `Link`."""
        return list(self._wake().collective_rpc("plumbline_report"))

    def complete(self, asked: Sequence[Asked]) -> list[list[Sample]]:
        """See `Link`."""
        sampling = [self._vllm.SamplingParams(**one.sampling(), detokenize=False) for one in asked]
        prompts = [{"prompt_token_ids": one.prompt, "cache_salt": one.salt} for one in asked]
        outputs = self._wake().generate(prompts, sampling, use_tqdm=False)
        return [[_sample_of(one) for one in sorted(o.outputs, key=lambda one: one.index)] for o in outputs]

    def score(self, texts: Sequence[list[int]], salt: str) -> list[list[float]]:
        """See `Link`."""
        sampling = self._vllm.SamplingParams(
            max_tokens=1, temperature=1.0, prompt_logprobs=1, detokenize=False
        )
        prompts = [{"prompt_token_ids": text, "cache_salt": salt} for text in texts]
        outputs = self._wake().generate(prompts, sampling, use_tqdm=False)
        return [
            [float(seen[token].logprob) for seen, token in zip(o.prompt_logprobs[1:], text[1:], strict=True)]
            for o, text in zip(outputs, texts, strict=True)
        ]

    def rest(self) -> None:
        """Weights to CPU memory, the cache dropped."""
        if self._sleep and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = True


def _sample_of(output: Any) -> Sample:
    ids = list(output.token_ids)
    logp = [float(seen[token].logprob) for seen, token in zip(output.logprobs, ids, strict=True)]
    return Sample(ids, logp, output.finish_reason)


class Server:
    """A server over HTTP; prompts go out side by side, answers come back in order."""

    once = True

    def __init__(self, url: str, folder: Path, timeout: float, requests: int) -> None:
        """`folder`: the server reads it too; `timeout`: seconds a call, all of a step's prompts, may take."""
        self._url, self._folder, self._timeout = url.rstrip("/"), folder.resolve(), timeout
        self._pool = ThreadPoolExecutor(requests, thread_name_prefix="vllm")
        # A proxy of the environment is for the world outside.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def version(self) -> str:
        """Version of vLLM that serves."""
        return str(self._call("/version", None, self._deadline()).get("version"))

    def load(self, items: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `Link`; the file is complete or absent, and gone once it is loaded."""
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"weights-{version}.safetensors"
        part = file.with_suffix(".part")
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in items}, part)
        part.replace(file)
        self._rpc("plumbline_load", [str(file), version])
        file.unlink()

    def reports(self) -> list[Report]:
        """See `Link`."""
        return self._rpc("plumbline_report", [])

    def complete(self, asked: Sequence[Asked]) -> list[list[Sample]]:
        """See `Link`."""
        bodies = [
            {**one.sampling(), "prompt": one.prompt, "cache_salt": one.salt, "return_token_ids": True}
            for one in asked
        ]
        return [
            [self._sample(choice) for choice in sorted(reply["choices"], key=lambda choice: choice["index"])]
            for reply in self._side_by_side(bodies)
        ]

    def score(self, texts: Sequence[list[int]], salt: str) -> list[list[float]]:
        """See `Link`."""
        fixed = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 1, "cache_salt": salt}
        replies = self._side_by_side([{**fixed, "prompt": text} for text in texts])
        found = [reply["choices"][0]["prompt_logprobs"] for reply in replies]
        return [
            [float(seen[str(token)]["logprob"]) for seen, token in zip(line[1:], text[1:], strict=True)]
            for line, text in zip(found, texts, strict=True)
        ]

    def rest(self) -> None:
        """The server has devices of its own."""

    def _side_by_side(self, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        deadline = self._deadline()
        return list(self._pool.map(lambda body: self._call("/v1/completions", body, deadline), bodies))

    def _rpc(self, method: str, arguments: list[Any]) -> list[Report]:
        body = {"method": method, "args": arguments}
        return list(self._call("/collective_rpc", body, self._deadline())["results"])

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout

    def _sample(self, choice: dict[str, Any]) -> Sample:
        ids, logp = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if not ids or not logp or len(ids) != len(logp):
            raise InfrastructureError(
                f"{self._url}: an answer came without its token ids and log-probabilities; the server must "
                f"be vLLM itself, with no gateway that rewrites replies: {SERVE}"
            )
        return Sample(list(ids), [float(value) for value in logp], choice.get("finish_reason"))

    def _call(self, path: str, body: dict[str, Any] | None, deadline: float) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {os.environ[KEY]}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)
        left = deadline - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            with self._opener.open(request, timeout=left) as response:
                reply = json.loads(response.read())
        except urllib.error.HTTPError as error:
            raise self._refused(path, error) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(getattr(error, "reason", error), TimeoutError):
                text = (
                    f"no reply within {self._timeout:g} s (optimize.generator.timeout); raise it, or look at"
                )
                raise InfrastructureError(f"{self._url}{path}: {text} the server's log") from error
            raise InfrastructureError(
                f"{self._url}{path}: {error}; the server is down or no vLLM, start it again: {SERVE}"
            ) from error
        if not isinstance(reply, dict):
            raise InfrastructureError(
                f"{self._url}{path}: the reply is no JSON object; the server is no vLLM"
            )
        return reply

    def _refused(self, path: str, error: urllib.error.HTTPError) -> Exception:
        text = error.read(2000).decode(errors="replace")
        said = f"{self._url}{path}: HTTP {error.code}: {text}"
        if error.code in (401, 403):
            return ConfigurationError(f"{said}; put the server's key into the environment variable {KEY}")
        if error.code == 404:
            return ConfigurationError(f"{said}; the server must be started for training: {SERVE}")
        if error.code < 500:
            return ConfigurationError(f"{said}; raise the server's --max-model-len, or lower the lengths")
        return InfrastructureError(f"{said}; look at the server's log; it must be started so: {SERVE}")
