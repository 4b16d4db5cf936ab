from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data.errors import ConfigurationError, DataError, DivergenceError, Stopped
from data.records import Demonstration, Preference, to_line
from tests.training.tiny import (
    byte_tokenizer,
    llama,
    prompt,
    run_program,
    save_policy,
    workdir,
    write_demonstrations,
    write_pairs,
)
from training import lifeline, rundir, sft
from training.batches import collate
from training.chat import encode_answer
from training.config import EngineParams, SftParams
from training.engine import Engine
from training.logprobs import AnswerLogprobs, answer_logprobs
from training.models import load_causal
from training.reference import Forward
from training.rundir import RunDir

ROOT = Path(__file__).resolve().parents[2]
PARAMS: dict[str, Any] = {
    "lr": 1e-2, "epochs": 2, "batch": 4, "token_budget": 128, "max_length": 64, "max_prompt": 48,
    "lora": {"rank": 2}, "stop_check": 2,
    "precision": "fp32", "checkpoint_every": 2, "engine": {"backend": "torch"},
}  # fmt: skip


def prepare(folder: Path, seed: int = 0, **changes: Any) -> Path:
    base, rows = folder / "base", folder / "demonstrations.jsonl"
    if not base.exists():
        save_policy(base)
        write_demonstrations(rows)
    inputs = {"model": base, "demonstrations": rows}
    return workdir(folder / "run", "sft", {**PARAMS, **changes}, inputs, seed)


def run(path: Path, stop_at: int | None = None) -> dict[str, Any]:
    return run_program(sft.main, path, stop_at)


def test_it_learns_and_says_what_it_did(tmp_path: Path) -> None:
    path = prepare(tmp_path, lora=None, epochs=4)
    result = run(path)
    assert result["status"] == "trained" and result["steps"] == 12 and result["rows"] == 12
    assert result["loss_last"] < result["loss_first"] - 1
    assert 0 < result["stop_share"] <= 1
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert json.loads((path / "progress.json").read_text())["step"] == 12
    batch = collate(sft.encode(byte_tokenizer(), [demonstration()], SftParams())[0], 1, shared=False)
    before, _ = answer_logprobs(llama(), batch)
    after, _ = answer_logprobs(load_causal(path / "model", torch.float32), batch)
    assert after.sum() > before.sum()


def demonstration(answer: str = "abab", text: str = "say 3") -> Demonstration:
    return Demonstration(prompt=prompt(text), id="x", group="x", answer=answer)


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_stopping_and_going_on_changes_nothing(tmp_path: Path, lora: Any) -> None:
    whole = run(prepare(tmp_path / "whole", lora=lora))
    path = prepare(tmp_path / "cut", lora=lora)
    # The config's inputs differ by folder only; the weights and logs must not.
    with pytest.raises(Stopped, match="after step 3 of 6"):
        run(path, stop_at=3)
    assert not (path / "result.json").exists()
    assert run(path) == whole
    for name in ("metrics.jsonl", "journal.jsonl"):
        assert (path / name).read_bytes() == (tmp_path / "whole" / "run" / name).read_bytes()


def test_a_model_that_never_ends_is_seen(tmp_path: Path) -> None:
    tok, params = byte_tokenizer(), SftParams(precision="fp32", stop_check=3)
    trees, _ = sft.encode(tok, [demonstration(), demonstration(text="b"), demonstration(text="c")], params)
    model = llama(tied=False)
    for sign, expected in ((-1, 0.0), (1, 1.0)):
        with torch.no_grad():
            model.lm_head.bias = torch.nn.Parameter(torch.zeros(258))
            model.lm_head.bias[1] = sign * 1e4
        assert sft.stop_share(model, tok, trees, params, 0) == expected
    assert sft.stop_share(model, tok, trees, SftParams(stop_check=0), 0) is None


def test_seeds_change_what_they_name(tmp_path: Path) -> None:
    # Without adapters nothing is drawn at the start: only the order of the rows can differ.
    results = [run(prepare(tmp_path / str(n), seed=seed, lora=None)) for n, seed in enumerate((0, 0, 1))]
    assert results[0] == results[1] and results[0]["digest"] != results[2]["digest"]


def test_a_run_that_is_done_publishes_again_what_it_had(tmp_path: Path) -> None:
    path = prepare(tmp_path)
    first = run(path)
    (path / "result.json").unlink()
    assert run(path) == first


def test_the_final_eos_is_in_the_loss_and_padding_is_not() -> None:
    tok = byte_tokenizer()
    assert tok.pad_token_id == tok.eos_token_id
    trees, dropped = sft.encode(tok, [demonstration("a"), demonstration("abcdef")], SftParams())
    batch = collate(trees, int(tok.pad_token_id), shared=False)
    assert not dropped
    assert batch.targets[batch.mask].tolist() == encode_answer(tok, "a") + encode_answer(tok, "abcdef")
    assert int((batch.targets[batch.mask] == tok.eos_token_id).sum()) == 2


def test_rows_over_a_limit_are_counted_never_cut() -> None:
    rows = [demonstration(), demonstration(text="x" * 50), demonstration("y" * 60), demonstration("")]
    trees, dropped = sft.encode(byte_tokenizer(), rows, SftParams(max_length=80, max_prompt=60))
    assert len(trees) == 1
    assert dropped == {"prompt over max_prompt": 1, "prompt and answer over max_length": 1, "empty answer": 1}


def test_nothing_left_to_learn_from_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none of 12 demonstrations"):
        run(prepare(tmp_path, max_length=12, max_prompt=8))


def test_chosen_answers_stand_in_for_demonstrations(tmp_path: Path) -> None:
    path = prepare(tmp_path)
    (tmp_path / "demonstrations.jsonl").write_text("")
    pairs = write_pairs(tmp_path / "pairs.jsonl", 4)
    first = pairs.read_text().splitlines(keepends=True)[0]
    disputed = Preference(prompt=prompt("q"), id="q", group="q", chosen="a", rejected="b", disputed=True)
    pairs.write_text(pairs.read_text() + first + to_line(disputed))
    config = json.loads((path / "config.json").read_text())
    config["inputs"]["pairs"] = str(pairs)
    (path / "config.json").write_text(json.dumps(config))
    rows = sft.demonstrations(RunDir.open(path, 0))
    assert [row.answer for row in rows] == ["yes", "yes.", "yes..", "yes..."]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_micro_batches_do_not_change_the_step(budget: int, shared: bool) -> None:
    trees, _ = sft.encode(
        byte_tokenizer(), [demonstration("ab" * n, f"say {n}") for n in range(1, 8)], SftParams()
    )
    params = SftParams(token_budget=budget, precision="fp32", engine=EngineParams(backend="torch"))
    model = llama()
    engine = Engine(
        AnswerLogprobs(model), params.engine, lr=1e-3, total_steps=1, warmup=0.0, min_lr_share=1.0,
        weight_decay=0.0, clip_norm=1.0,
    )  # fmt: skip
    forward = Forward(engine, 1, shared, budget, 1.0, "fp32")
    loss, count = sft.train_step(forward, trees, params)
    assert count == sum(len(tree.answers[0]) for tree in trees)
    assert loss == pytest.approx(5.56, abs=0.2)
    assert engine.step().grad_norm == pytest.approx(self_norm(), rel=1e-5)


_norms: list[float] = []


def self_norm() -> float:
    """Gradient norm of the same rows in one batch, by plain autograd."""
    if not _norms:
        model = llama()
        rows = [demonstration("ab" * n, f"say {n}") for n in range(1, 8)]
        trees, _ = sft.encode(byte_tokenizer(), rows, SftParams())
        batch = collate(trees, 1, shared=False)
        logits = model(batch.input_ids, position_ids=batch.position_ids).logits.flatten(0, 1)
        logp = torch.log_softmax(logits[batch.source[batch.mask]].double(), -1)
        (-logp.gather(1, batch.targets[batch.mask][:, None]).mean()).backward()
        _norms.append(float(sum(p.grad.double().square().sum() for p in model.parameters()) ** 0.5))
    return _norms[0]


def test_numbers_that_break_end_the_run_and_keep_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = prepare(tmp_path)
    with pytest.raises(Stopped):
        run(path, stop_at=2)
    original = sft.losses.cross_entropy

    def broken(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        return out._replace(loss=out.loss * float("nan"))

    monkeypatch.setattr(sft.losses, "cross_entropy", broken)
    with pytest.raises(DivergenceError, match="3 steps in a row"):
        run(path)
    assert "non-finite gradient" in (path / "journal.jsonl").read_text()
    assert not (path / "model").exists()
    assert (path / "checkpoints" / "step-00000002" / "COMPLETE").exists()


def test_an_unknown_parameter_stops_before_any_weight_is_read(tmp_path: Path) -> None:
    path = prepare(tmp_path, epoch=3)
    with pytest.raises(ConfigurationError, match="epoch"):
        run(path)


def launch(path: Path, processes: int = 1) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "training.launch",
        "--processes",
        str(processes),
        "-m",
        "training.sft",
        str(path),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)


def wait_for(condition: Any, seconds: float = 180.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "deepspeed"])
def test_killed_workers_leave_nothing_and_the_rerun_gives_the_same_bytes(
    tmp_path: Path, backend: str
) -> None:
    changes: dict[str, Any] = {"epochs": 40, "checkpoint_every": 1, "engine": {"backend": backend}}
    whole, cut = prepare(tmp_path / "whole", **changes), prepare(tmp_path / "cut", **changes)
    done = launch(whole)
    assert done.wait(timeout=300) == 0, done.stderr and done.stderr.read()[-2000:]
    for _ in range(2):
        before = len(list((cut / "checkpoints").glob("step-*"))) and lines(cut)
        process = launch(cut)
        wait_for(lambda before=before: lines(cut) > before + 5)
        workers = lifeline.descendants(process.pid)
        process.kill()
        process.wait()
        wait_for(lambda workers=workers: not any(lifeline.start_of(pid) for pid in workers), 20)
    again = launch(cut)
    assert again.wait(timeout=300) == 0
    for name in ("metrics.jsonl", "journal.jsonl", "result.json"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), name


def lines(path: Path) -> int:
    file = path / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.slow
def test_a_stop_signal_to_the_launcher_leaves_a_checkpoint_and_code_14(tmp_path: Path) -> None:
    path = prepare(tmp_path, epochs=200, checkpoint_every=1000)
    process = launch(path)
    wait_for(lambda: lines(path) > 3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 14
    assert json.loads((path / "error.json").read_text())["kind"] == "stopped"
    assert len(list((path / "checkpoints").glob("step-*/COMPLETE"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1.0, 6.0])
def test_a_stop_signal_during_the_start_is_a_stop_too(tmp_path: Path, seconds: float) -> None:
    process = launch(prepare(tmp_path))
    time.sleep(seconds)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 14


@pytest.mark.slow
def test_the_exit_code_is_the_kind_of_failure(tmp_path: Path) -> None:
    path = prepare(tmp_path, max_length=12, max_prompt=8)
    assert launch(path).wait(timeout=120) == 11
    assert launch(tmp_path / "nowhere").wait(timeout=120) == 10


@pytest.mark.slow
def test_two_ranks_train_the_same_model_as_one(tmp_path: Path) -> None:
    for name, count in (("one", 1), ("two", 2)):
        path = prepare(tmp_path / name, lora=None, processes=count)
        process = launch(path, count)
        assert process.wait(timeout=300) == 0, process.stderr and process.stderr.read()[-2000:]
    one, two = (json.loads((tmp_path / name / "run" / "result.json").read_text()) for name in ("one", "two"))
    assert one["loss_last"] == pytest.approx(two["loss_last"], rel=1e-4)
    path = prepare(tmp_path / "two", lora=None, processes=2)
    for old in (path / "checkpoints").glob("step-*"):
        assert (old / "random-1.pt").exists()


@pytest.mark.slow
def test_two_ranks_that_hold_one_model_publish_the_same_weights(tmp_path: Path) -> None:
    found = []
    for name, count in (("one", 1), ("two", 2)):
        engine = {"zero": 1, "tensor_parallel": count}
        path = prepare(tmp_path / name, lora=None, processes=count, engine=engine)
        process = launch(path, count)
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said[-2000:]
        found.append(load_file(path / "model" / "model.safetensors"))
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        assert torch.allclose(tensor, found[1][name], atol=1e-4), name


def test_the_program_module_is_wired(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rundir.program is sft.program
