from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from transformers import MistralConfig, MistralForCausalLM

from data.errors import DivergenceError
from tests.training.tiny import gpt2, llama
from training.batches import Tree, collate
from training.config import LoraParams
from training.decoding import DecodingState, RoomyLayer, common_prefix, openings, pad_left
from training.generate import (
    BuiltinGenerator,
    Rollout,
    choose,
    close_ranks,
    merged,
    prompt_key,
    row_seed,
    uniforms,
)
from training.logprobs import answer_logprobs, backbone_and_head
from training.models import add_lora
from training.packed import in_blocks, multiply, pack

STOP = 1


def prompts(count: int = 6, seed: int = 0, opening: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return [int(i) for i in torch.randint(2, 60, (length,), generator=generator)]

    start = ids(opening, opening + 1) if opening else []
    return [start + ids(1, 9) for _ in range(count)]


def sharp(model: Any, factor: float = 5.0) -> Any:
    """A random model's distribution is nearly flat; this one prefers some tokens, EOS among them."""
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head.mul_(factor)
        head[STOP] += head[5]
    return model


def generator(model: Any, **changes: Any) -> BuiltinGenerator:
    return BuiltinGenerator(model, [STOP], STOP, **changes)


def by_hand(model: Any, prompt: list[int], seed: int, temperature: float, limit: int) -> list[int]:
    """One answer, the whole sequence computed anew for each token."""
    ids: list[int] = []
    for position in range(limit):
        logits = model(torch.tensor([prompt + ids])).logits[0, -1].double()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            chances = (logits / temperature).softmax(-1)
            draw = float(uniforms(numpy.array([seed], dtype=numpy.uint64), position)[0])
            total, token = 0.0, 0
            for token, chance in enumerate(chances.tolist()):  # noqa: B007
                total += chance
                if total > draw:
                    break
        ids.append(token)
        if token == STOP:
            break
    return ids


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("opening", [0, 12])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_against_recomputing_every_token(make: Any, temperature: float, opening: int) -> None:
    model = sharp(make(vocab=60)).eval()
    texts = prompts(opening=opening)
    found = generator(model).generate(
        texts, 3, max_new_tokens=9, temperature=temperature, keys=list("abcdef"), seed=7, step=2
    )
    lengths = set()
    for index, (prompt, key) in enumerate(zip(texts, "abcdef", strict=True)):
        for sample in range(3):
            expected = by_hand(model, prompt, row_seed(7, 2, key, sample), temperature, 9)
            assert found.answers[index][sample] == expected
            assert found.finished[index][sample] == (expected[-1] == STOP)
            lengths.add(len(expected))
    assert temperature == 0 or len(lengths) > 2, "answers of one length would not test that rows leave"


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("opening", [0, 12])
def test_its_logp_are_the_trainers(temperature: float, opening: int) -> None:
    model = sharp(llama(vocab=60)).eval()
    texts = prompts(opening=opening)
    found = generator(model).generate(texts, 2, max_new_tokens=8, temperature=temperature, seed=3)
    trees = [Tree("", prompt, answers) for prompt, answers in zip(texts, found.answers, strict=True)]
    batch = collate(trees, STOP, shared=True)
    with torch.no_grad():
        logp, _ = answer_logprobs(model, batch, temperature)
    made = torch.tensor([x for samples in found.logp for row in samples for x in row])
    assert (logp[batch.mask] - made).abs().max() < 5e-6


def same(first: Rollout, second: Rollout, order: list[int]) -> bool:
    return all(
        first.answers[index] == second.answers[place] and first.finished[index] == second.finished[place]
        for place, index in enumerate(order)
    )


def test_samples_do_not_depend_on_batch_or_order() -> None:
    model = sharp(llama(vocab=60)).eval()
    texts, keys = prompts(8, opening=10), list("abcdefgh")
    whole = generator(model).generate(texts, 4, max_new_tokens=9, temperature=1.0, keys=keys)
    narrow = generator(model, max_rows=4).generate(texts, 4, max_new_tokens=9, temperature=1.0, keys=keys)
    assert same(whole, narrow, list(range(8)))
    order = [3, 7, 0]
    some = generator(model).generate(
        [texts[i] for i in order], 4, max_new_tokens=9, temperature=1.0, keys=[keys[i] for i in order]
    )
    assert same(whole, some, order)
    fewer = generator(model).generate(texts, 2, max_new_tokens=9, temperature=1.0, keys=keys)
    assert all(fewer.answers[i] == whole.answers[i][:2] for i in range(8))


def test_seed_step_key_and_sample_each_change_the_draw() -> None:
    base = row_seed(0, 0, "a", 0)
    others = [row_seed(1, 0, "a", 0), row_seed(0, 1, "a", 0), row_seed(0, 0, "b", 0), row_seed(0, 0, "a", 1)]
    assert len({base, *others}) == 5
    assert row_seed(0, 11, "a", 1) != row_seed(0, 1, "1a", 1)
    model = sharp(llama(vocab=60)).eval()
    made = [
        generator(model).generate(prompts(2), 2, max_new_tokens=9, temperature=1.0, seed=seed, step=step)
        for seed, step in ((0, 0), (1, 0), (0, 1), (0, 0))
    ]
    assert made[0].answers == made[3].answers
    assert made[0].answers != made[1].answers != made[2].answers
    assert made[0].answers[0][0] != made[0].answers[0][1]


def test_default_keys_are_the_prompts() -> None:
    assert prompt_key([1, 2]) == prompt_key([1, 2]) != prompt_key([12])
    model = sharp(llama(vocab=60)).eval()
    text = prompts(1)[0]
    twice = generator(model).generate([text, text], 1, max_new_tokens=9, temperature=1.0)
    assert twice.answers[0] == twice.answers[1]


def test_uniforms_are_uniform_and_repeat() -> None:
    seeds = numpy.array([row_seed(0, 0, str(n), 0) for n in range(2000)], dtype=numpy.uint64)
    draws = numpy.stack([uniforms(seeds, position) for position in range(5)])
    assert (draws >= 0).all() and (draws < 1).all()
    assert abs(draws.mean() - 0.5) < 4 / math.sqrt(12 * draws.size)
    assert abs(float(numpy.corrcoef(draws[0], draws[1])[0, 1])) < 4 / math.sqrt(2000)
    assert (uniforms(seeds, 3) == draws[3]).all()
    # SplitMix64 of seed 0, from its reference implementation: the first output.
    first = uniforms(numpy.array([0], dtype=numpy.uint64), 0)[0]
    assert first == (0xE220A8397B1DCDAF >> 11) * 2.0**-53


def test_choose_follows_the_distribution_at_the_temperature() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0])
    rows = 20_000
    draws = torch.linspace(0, 1, rows + 1, dtype=torch.float64)[:-1]
    token, logp = choose(logits.repeat(rows, 1), 0.5, draws)
    expected = (logits / 0.5).softmax(-1)
    shares = torch.bincount(token, minlength=4) / rows
    assert (shares - expected).abs().max() < 2 / rows
    assert torch.allclose(logp, expected.log()[token], atol=1e-6)


def test_choose_never_takes_what_has_no_chance() -> None:
    logits = torch.full((3, 5), -torch.inf)
    logits[:, 2] = 0.0
    draws = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    token, logp = choose(logits, 1.0, draws)
    assert token.tolist() == [2, 2, 2] and logp.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("greedy", [False, True])
def test_logits_that_are_not_finite_are_a_divergence(value: float, greedy: bool) -> None:
    draws = None if greedy else torch.tensor([0.2, 0.9], dtype=torch.float64)
    logits = torch.zeros(2, 5)
    # A column of -inf is a token without a chance; a whole row of them leaves none.
    logits[1, slice(None) if value < 0 else 3] = value
    with pytest.raises(DivergenceError, match=r"logits are not finite.*optimize\.lr"):
        choose(logits, 1.0, draws)


def test_rows_leave_when_they_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharp(llama(vocab=60)).eval()
    widths: list[int] = []
    step = DecodingState.step

    def counted(self: DecodingState, token: Any) -> Any:
        widths.append(len(token))
        return step(self, token)

    monkeypatch.setattr(DecodingState, "step", counted)
    found = generator(model).generate(prompts(8), 4, max_new_tokens=12, temperature=1.0)
    lengths = [len(answer) for samples in found.answers for answer in samples]
    assert widths == [sum(length > at for length in lengths) for at in range(1, max(lengths))]


def test_prompts_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(vocab=60).eval()
    backbone, _ = backbone_and_head(model)
    seen: list[tuple[int, ...]] = []
    backbone.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    texts = [[*range(2, 14), n] for n in range(20, 25)]
    generator(model).generate(texts, 6, max_new_tokens=1, temperature=1.0)
    assert seen == [(1, 12), (5, 1)]


def test_models_that_cannot_share_take_the_plain_way() -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=6, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    model = sharp(MistralForCausalLM(config)).eval()
    texts = prompts(4)
    found = generator(model).generate(texts, 2, max_new_tokens=8, temperature=1.0, keys=list("abcd"))
    for index, key in enumerate("abcd"):
        for sample in range(2):
            expected = by_hand(model, texts[index], row_seed(0, 0, key, sample), 1.0, 8)
            assert found.answers[index][sample] == expected


def test_one_token_answers_and_immediate_ends() -> None:
    model = llama(vocab=60).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    found = generator(model).generate(prompts(3), 2, max_new_tokens=1, temperature=0.0)
    assert all(len(answer) == 1 for samples in found.answers for answer in samples)
    assert found.logp[0][0][0] == pytest.approx(-math.log(60), abs=1e-5)
    only_stop = BuiltinGenerator(model, list(range(60)), STOP)
    ended = only_stop.generate(prompts(3), 2, max_new_tokens=5, temperature=1.0)
    assert all(len(answer) == 1 for samples in ended.answers for answer in samples)
    assert all(all(flags) for flags in ended.finished)


def test_adapters_are_merged_for_a_while_and_leave_no_trace() -> None:
    base = sharp(llama(vocab=60))
    model = add_lora(base, LoraParams(rank=4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    texts = prompts(4)
    found = generator(model).generate(texts, 2, max_new_tokens=8, temperature=1.0)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    trees = [Tree("", prompt, answers) for prompt, answers in zip(texts, found.answers, strict=True)]
    batch = collate(trees, STOP, shared=True)
    with torch.no_grad():
        logp, _ = answer_logprobs(model, batch)
        with model.disable_adapter():
            without, _ = answer_logprobs(model, batch)
    made = torch.tensor([x for samples in found.logp for row in samples for x in row])
    assert (logp[batch.mask] - made).abs().max() < 1e-5
    assert (without - logp).abs().max() > 1e-3
    with pytest.raises(RuntimeError, match="broken"), merged(model):
        raise RuntimeError("broken")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_gradient_checkpointing_does_not_switch_the_cache_off() -> None:
    model = sharp(llama(vocab=60)).eval()
    expected = generator(model).generate(prompts(3), 2, max_new_tokens=8, temperature=1.0)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    assert (
        generator(model).generate(prompts(3), 2, max_new_tokens=8, temperature=1.0).answers
        == expected.answers
    )
    assert model.training


def counted_products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one at each product with packed weights."""
    calls: list[int] = []

    def counting(weight: Tensor, bias: Tensor | None) -> Any:
        forward = multiply(weight, bias)
        return lambda hidden: calls.append(1) or forward(hidden)

    monkeypatch.setattr("training.packed.multiply", counting)
    return calls


def test_the_packed_head_gives_the_same_answers_and_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharp(llama(vocab=60)).eval()
    expected = generator(model).generate(prompts(4), 3, max_new_tokens=8, temperature=1.0)
    monkeypatch.setattr("training.packed.MIN_HEAD", 1)
    engine, calls = generator(model), counted_products(monkeypatch)
    found = engine.generate(prompts(4), 3, max_new_tokens=8, temperature=1.0)
    assert calls and found.answers == expected.answers
    assert "forward" not in vars(model.lm_head)
    # Weights that change in place are packed anew.
    with torch.no_grad():
        model.lm_head.weight.mul_(-1.0)
    changed = engine.generate(prompts(4), 3, max_new_tokens=8, temperature=1.0)
    assert (
        changed.answers == generator(model).generate(prompts(4), 3, max_new_tokens=8, temperature=1.0).answers
    )
    assert changed.answers != expected.answers


def test_a_frozen_head_is_packed_once_and_one_that_learns_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.packed.MIN_HEAD", 1)
    packed: list[tuple[int, ...]] = []
    monkeypatch.setattr("training.packed.pack", lambda weight: packed.append(weight.shape) or pack(weight))
    model = sharp(llama(vocab=60)).eval()
    for learns, times in ((True, 2), (False, 1)):
        model.lm_head.weight.requires_grad_(learns)
        engine = generator(model)
        packed.clear()
        for _ in range(2):
            engine.generate(prompts(2), 2, max_new_tokens=3, temperature=1.0)
        assert len(packed) == times


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("lora", [False, True])
def test_packed_layers_give_the_same_answers_and_leave(
    make: Any, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sharp(make())
    if lora:
        model = add_lora(model, LoraParams(rank=2))
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(1))
    threads = torch.get_num_threads()
    expected = generator(model).generate(prompts(4), 3, max_new_tokens=8, temperature=1.0)
    monkeypatch.setattr("training.packed.MIN_TOKENS", 8)
    monkeypatch.setattr("training.packed.MIN_WEIGHTS", 1)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    calls = counted_products(monkeypatch)
    try:
        torch.set_num_threads(2)
        found = generator(model).generate(prompts(4), 3, max_new_tokens=8, temperature=1.0)
        used = len(calls)
        for few, tokens in ((3, 7), (9, 8)):  # short answers; 36 answers at a time
            generator(model).generate(prompts(4), few, max_new_tokens=tokens, temperature=1.0)
        with monkeypatch.context() as wider:
            wider.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
            generator(model).generate(prompts(4), 3, max_new_tokens=8, temperature=1.0)
        torch.set_num_threads(1)
        generator(model).generate(prompts(4), 3, max_new_tokens=8, temperature=1.0)
    finally:
        torch.set_num_threads(threads)
    assert len(calls) == used and bool(used) == (make is llama), "gpt2 has no nn.Linear but its head"
    assert found.answers == expected.answers
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize(("rows", "blocked"), [(3, False), (4, True), (12, True), (13, False)])
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_are_multiplied_block_by_block(
    rows: int, blocked: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Linear(40, 2 * 58, bias=bias)
    hidden = torch.randn(rows, 1, 40)
    batches: list[tuple[int, ...]] = []
    monkeypatch.setattr(torch, "bmm", lambda a, b, bmm=torch.bmm: batches.append(tuple(b.shape)) or bmm(a, b))
    forward = in_blocks(layer.weight, layer.bias)
    assert forward is not None
    torch.testing.assert_close(forward(hidden), layer(hidden), rtol=1e-5, atol=1e-6)
    assert batches == ([(2, 40, 58)] if blocked else [])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(forward(hidden), layer(hidden)), "autocast narrows these layers, as in training"


def test_a_layer_without_a_block_that_divides_it_is_left() -> None:
    assert in_blocks(torch.zeros(101, 8), None) is None
    assert in_blocks(torch.zeros(8, 96).t(), None) is None


@pytest.mark.parametrize(("make", "head", "layers"), [(llama, 96, 14), (llama, 101, 14), (gpt2, 96, 0)])
def test_layers_in_blocks_give_the_same_answers_and_leave(
    make: Any, head: int, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head too, where few answers are sampled and a block divides it; packed otherwise."""
    model = sharp(make(vocab=head))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    few, many = (
        generator(model).generate(prompts(4), group, max_new_tokens=8, temperature=1.0) for group in (2, 4)
    )
    monkeypatch.setattr("training.packed.MIN_WEIGHTS", 1)
    monkeypatch.setattr("training.packed.MIN_HEAD", 1)
    monkeypatch.setattr("training.packed.BLOCK_ROWS", range(48, 7, -1))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    made: list[Any] = []
    monkeypatch.setattr("training.packed.in_blocks", lambda w, b: made.append(in_blocks(w, b)) or made[-1])
    packed = counted_products(monkeypatch)
    found = generator(model).generate(prompts(4), 2, max_new_tokens=8, temperature=1.0)
    assert found.answers == few.answers
    assert sum(one is not None for one in made) == layers + (head == 96) and bool(packed) == (head != 96)
    assert generator(model).generate(prompts(4), 4, max_new_tokens=8, temperature=1.0).answers == many.answers
    assert packed, "16 answers: the head is packed"
    assert all("forward" not in vars(module) for module in model.modules())


def test_the_last_rows_fill_the_gaps() -> None:
    ended = torch.tensor([False, True, False, True, False, True, False])
    assert close_ranks(ended).tolist() == [0, 4, 2, 6]
    assert close_ranks(torch.tensor([True, True, False])).tolist() == [2]
    assert close_ranks(torch.tensor([False, False, True])).tolist() == [0, 1]
    keys = torch.arange(7.0)[:, None, None, None].repeat(1, 2, 8, 4)
    layer = RoomyLayer(keys, -keys.clone(), 3)
    layer.keep(close_ranks(ended))
    assert layer.keys[:, 1, 2, 3].tolist() == [0, 4, 2, 6] and layer.values[:, 0, 0, 0].tolist() == [
        0,
        -4,
        -2,
        -6,
    ]
    grown, _ = layer.update(torch.full((4, 2, 1, 4), 9.0), torch.zeros(4, 2, 1, 4))
    assert grown[:, 0, :, 0].tolist() == [[0, 0, 0, 9], [4, 4, 4, 9], [2, 2, 2, 9], [6, 6, 6, 9]]


def test_small_parts() -> None:
    assert common_prefix([[1] * 9 + [2], [1] * 9 + [3, 4]]) == 9
    assert common_prefix([[1] * 9, [1] * 12]) == 8
    assert common_prefix([[1] * 7 + [2], [1] * 7 + [3]]) == 0
    assert common_prefix([[1] * 20]) == 0
    ids, present = pad_left([[5], [6, 7]], 0, torch.device("cpu"))
    assert ids.tolist() == [[0, 5], [6, 7]] and present.tolist() == [[False, True], [True, True]]
    found = openings([[1] * 9 + [2], [5, 6], [1] * 9 + [3, 4], [7] * 12])
    assert found == [(9, [0, 2]), (0, [1, 3])]
