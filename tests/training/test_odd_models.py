"""Causal LMs of many kinds: what training reads is what the model says, whatever it is made of."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from data.errors import ConfigurationError
from data.records import Prompt, to_line
from tests.training.tiny import (
    byte_tokenizer,
    prompt,
    run_program,
    save_policy,
    workdir,
    write_demonstrations,
    write_pairs,
)
from training import compare, preference, rl, rl_setting, sft
from training.batches import Batch, Tree, cannot_share, collate
from training.config import LoraParams
from training.decoding import DecodingState
from training.generate import BuiltinGenerator
from training.heads import require_head
from training.logprobs import answer_logprobs, backbone_and_head
from training.models import load_causal, load_policy, merge_and_save
from training.score import load_backbone
from training.uncached import Recomputed, why_not

WORDS = 70
IDS: dict[str, Any] = {"pad_token_id": 1, "eos_token_id": 1, "bos_token_id": 0}
BASIC: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **IDS,
}  # fmt: skip
WIDE: dict[str, Any] = {**BASIC, "intermediate_size": 48, "max_position_embeddings": 128}
GROUPED: dict[str, Any] = {**WIDE, "num_key_value_heads": 2}
HEADED: dict[str, Any] = {**GROUPED, "head_dim": 8}
SHORT: dict[str, Any] = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, **IDS}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GEMMA2: dict[str, Any] = {**HEADED, "sliding_window": 4, "query_pre_attn_scalar": 8}

# name -> (configuration, whether a prompt is computed once for its answers)
MODELS: dict[str, tuple[Any, bool]] = {
    "gpt2": (t.GPT2Config(**SHORT, n_positions=128, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0), True),
    "gpt2 with dropout": (t.GPT2Config(**SHORT, n_positions=128), False),
    "gpt-neox": (t.GPTNeoXConfig(**WIDE), True),
    "gpt-neo": (
        t.GPTNeoConfig(
            vocab_size=WORDS, hidden_size=32, num_layers=2, num_heads=4, window_size=4,
            attention_types=[[["global", "local"], 1]], max_position_embeddings=128, **IDS,
        ),
        False,
    ),
    "openai-gpt, no cache": (t.OpenAIGPTConfig(**SHORT, n_positions=128), False),
    "llama": (t.LlamaConfig(**GROUPED, tie_word_embeddings=False), True),
    "llama tied": (t.LlamaConfig(**GROUPED, tie_word_embeddings=True), True),
    "llama 4 text": (
        t.Llama4TextConfig(**HEADED, num_local_experts=2, attention_chunk_size=8, intermediate_size_mlp=48),
        False,
    ),
    "qwen2": (t.Qwen2Config(**GROUPED), True),
    "qwen2 sliding": (
        t.Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=4, max_window_layers=1), False
    ),
    "qwen3": (t.Qwen3Config(**HEADED), True),
    "qwen3-next": (
        t.Qwen3NextConfig(
            **HEADED, **EXPERTS, num_experts=4, shared_expert_intermediate_size=16, linear_num_key_heads=2,
            linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        ),
        False,
    ),
    "gemma": (t.GemmaConfig(**HEADED), True),
    "gemma2": (t.Gemma2Config(**GEMMA2, final_logit_softcapping=3.0, attn_logit_softcapping=5.0), False),
    "gemma3": (t.Gemma3TextConfig(**GEMMA2), False),
    "gemma3 with eyes": (
        t.Gemma3Config(
            text_config=GEMMA2,
            vision_config={
                "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                "image_size": 28, "patch_size": 14,
            },
        ),
        False,
    ),
    "phi3": (t.Phi3Config(**GROUPED), True),
    "mistral sliding": (t.MistralConfig(**GROUPED, sliding_window=4), False),
    "mamba": (
        t.MambaConfig(vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, state_size=4, **IDS), False
    ),
    "mamba2": (
        t.Mamba2Config(
            vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8,
            n_groups=1, chunk_size=8, **IDS,
        ),
        False,
    ),
    "recurrent gemma": (
        t.RecurrentGemmaConfig(
            **{**BASIC, "num_hidden_layers": 3}, intermediate_size=48, lru_width=32, attention_window_size=8,
            logits_soft_cap=2.0,
        ),
        False,
    ),
    "falcon-h1": (
        t.FalconH1Config(
            **GROUPED, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8,
            lm_head_multiplier=0.25,
        ),
        False,
    ),
    "xlstm": (
        t.xLSTMConfig(
            vocab_size=WORDS, hidden_size=32, num_heads=4, num_blocks=2, output_logit_soft_cap=2.0, **IDS
        ),
        False,
    ),
    "falcon": (t.FalconConfig(**BASIC), True),
    "falcon alibi": (t.FalconConfig(**BASIC, alibi=True), False),
    "bloom": (t.BloomConfig(vocab_size=WORDS, hidden_size=32, n_layer=2, n_head=4, **IDS), False),
    "opt": (
        t.OPTConfig(
            **BASIC, ffn_dim=48, max_position_embeddings=128, word_embed_proj_dim=16, dropout=0.0,
            do_layer_norm_before=False,
        ),
        True,
    ),
    "bart's decoder": (
        t.BartConfig(
            vocab_size=WORDS, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48,
            max_position_embeddings=128, is_decoder=True, is_encoder_decoder=False, **IDS,
        ),
        False,
    ),
    "mixtral": (t.MixtralConfig(**GROUPED, num_local_experts=4, output_router_logits=True), False),
    "qwen2-moe": (
        t.Qwen2MoeConfig(**GROUPED, **EXPERTS, num_experts=4, shared_expert_intermediate_size=16), False
    ),
    "cohere": (t.CohereConfig(**GROUPED, logit_scale=0.3), True),
    "granite": (t.GraniteConfig(**GROUPED, logits_scaling=3.0), True),
    "stablelm": (t.StableLmConfig(**GROUPED), True),
    "nemotron": (t.NemotronConfig(**GROUPED), True),
}  # fmt: skip
TREES = [
    Tree("a", [3, 4, 5, 6, 7, 8, 9], [[10, 11, 12, 1], [13, 14, 15, 16, 17, 18, 19, 20, 1], [1]]),
    Tree("b", [21, 22], [[23, 1], [24, 25, 26], [27, 28, 29]]),
]


def build(config: Any) -> Any:
    """Random weights, wide enough that a wrong mask, position or head shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.config.use_cache = False
    return model.eval()


@pytest.fixture(scope="module", params=MODELS)
def named(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, build(MODELS[request.param][0])


def test_log_probabilities_are_those_of_the_models_own_logits(named: tuple[str, Any]) -> None:
    logp, _ = answer_logprobs(named[1], collate(TREES, 1, shared=False), 0.7)
    rows = [(tree.prompt, answer) for tree in TREES for answer in tree.answers]
    for row, (asked, answer) in enumerate(rows):
        with torch.no_grad():
            logits = named[1](torch.tensor([asked + answer]), use_cache=False).logits[0].float() / 0.7
        expected = logits.log_softmax(-1)[len(asked) - 1 : -1].gather(-1, torch.tensor(answer)[:, None])
        assert torch.allclose(logp[row, : len(answer)], expected[:, 0], atol=2e-5)


def gradient(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    logp, _ = answer_logprobs(model, batch, 0.7)
    (logp * torch.linspace(-1, 1, logp.numel()).view(logp.shape)).sum().backward()  # type: ignore[no-untyped-call]
    return logp.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_a_prompt_is_shared_where_that_changes_nothing(named: tuple[str, Any]) -> None:
    name, model = named
    assert (cannot_share(model) is None) == MODELS[name][1]
    if MODELS[name][1]:
        logp, plain = gradient(model, collate(TREES, 1, shared=False))
        found, shared = gradient(model, collate(TREES, 1, shared=True))
        assert torch.allclose(logp, found, atol=2e-5)
        assert float((plain - shared).norm() / plain.norm()) < 1e-5


def test_generator_and_trainer_agree(named: tuple[str, Any]) -> None:
    """Prompts of unlike length, answers that end at different times."""
    prompts = [[3, 4, 5, 6, 7, 8, 9], [21, 22], [5]]
    made = BuiltinGenerator(named[1], [1, 2, 3, 4, 5, 6], 1).generate(
        prompts, 3, max_new_tokens=9, temperature=0.7, seed=1
    )
    lengths = {len(answer) for answers in made.answers for answer in answers}
    assert len(lengths) > 1, "answers of one length would not test that rows leave"
    trees = [Tree("", asked, answers) for asked, answers in zip(prompts, made.answers, strict=True)]
    batch = collate(trees, 1, shared=False)
    logp, _ = answer_logprobs(named[1], batch, 0.7)
    drawn = torch.tensor([value for samples in made.logp for row in samples for value in row])
    assert torch.allclose(logp[batch.mask], drawn, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("mistral sliding", ""), ("mamba2", ""), ("xlstm", "it fails"), ("bart's decoder", "off")],
)
def test_a_cache_is_tried_before_it_is_used(
    name: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build(MODELS[name][0])
    backbone, head = backbone_and_head(model)
    with torch.no_grad():
        found = why_not(DecodingState, backbone, head, 1)
    assert reason in found and bool(found) == bool(reason)
    generator = BuiltinGenerator(model, [1], 1)
    for _ in range(2):
        generator.generate([[3, 4]], 1, max_new_tokens=2, temperature=1.0)
    assert capsys.readouterr().out.count("cache can't be used") == bool(reason), "told once"


def test_sequences_in_place_of_a_cache_are_cut_into_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, head = backbone_and_head(build(MODELS["llama"][0]))
    prompts = [[3, 4, 5], [6], [7, 8, 9, 10, 11]]
    with torch.no_grad():
        whole, _ = Recomputed(backbone, head, 1).prefill(prompts, 2, 4, [])
        monkeypatch.setattr("training.uncached.TOKENS", 6)
        parts, _ = Recomputed(backbone, head, 1).prefill(prompts, 2, 4, [])
    assert torch.allclose(whole, parts, atol=1e-5) and whole.shape == (6, WORDS)
    assert torch.equal(whole[0], whole[1]) and not torch.allclose(whole[0], whole[2])


def save(folder: Path, model: nn.Module) -> Path:
    model.save_pretrained(folder)  # type: ignore[operator]
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_a_head_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """BERT's decoder puts a dense layer and a norm between its states and its output embeddings."""
    model = build(t.BertConfig(**WIDE, is_decoder=True))
    with pytest.raises(
        ConfigurationError, match=r"BertLMHeadModel does something to its logits.*bound 0\.0001"
    ):
        require_head(model, tmp_path)
    # A cap that nobody knows of, hardly more than rounding for logits as small as these.
    model = build(MODELS["llama"][0])
    require_head(model, tmp_path)
    own = model.forward
    model.forward = lambda **given: SimpleNamespace(logits=50 * torch.tanh(own(**given).logits / 50))
    with pytest.raises(ConfigurationError, match="no log-probability would be its own"):
        require_head(model, tmp_path)
    model.to(torch.bfloat16)
    require_head(model, tmp_path)


def test_a_head_is_asked_as_the_model_will_be_run(tmp_path: Path) -> None:
    require_head(build(MODELS["mamba"][0]).to(torch.bfloat16), tmp_path)


@pytest.mark.parametrize("program", [sft, preference, rl, compare])
def test_every_program_asks_before_it_trusts_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Any
) -> None:
    def refuse(model: Any, path: Path | str) -> None:
        raise ConfigurationError(f"{path}: asked")

    monkeypatch.setattr(rl_setting if program is rl else program, "require_head", refuse)
    source, rows = save_policy(tmp_path / "model"), write_pairs(tmp_path / "pairs.jsonl", 6)
    prompts = [Prompt(prompt=prompt(f"say {n}"), id=str(n), group=str(n)) for n in range(60)]
    (tmp_path / "prompts.jsonl").write_text("".join(map(to_line, prompts)), encoding="utf-8")
    inputs = dict.fromkeys(("model", "candidate", "champion", "judge"), source)
    inputs |= {"pairs": rows, "test": rows, "prompts": tmp_path / "prompts.jsonl"}
    inputs |= {"demonstrations": write_demonstrations(tmp_path / "shown.jsonl")}
    params: dict[str, Any] = {"precision": "fp32"}
    params |= {"algorithm": "dpo"} if program is preference else {}
    path = workdir(tmp_path / "run", program.__name__.rpartition(".")[2], params, inputs)
    with pytest.raises(ConfigurationError, match="asked"):
        run_program(program.main, path)


@pytest.mark.parametrize("lora", [False, True])
def test_policies_that_are_compared_have_no_dropout_of_their_own(tmp_path: Path, lora: bool) -> None:
    source = save(tmp_path, build(MODELS["gpt2 with dropout"][0]))
    adapters = LoraParams(rank=2) if lora else None
    assert "dropout" in str(cannot_share(load_policy(source, "fp32", adapters)))
    model = load_policy(source, "fp32", adapters, dropout=False)
    assert model.training and cannot_share(model) is None
    first, again = (answer_logprobs(model, collate(TREES, 1, shared=True))[0] for _ in range(2))
    assert torch.equal(first, again)
    assert model.config.attn_pdrop == 0.1, "what is published trains on as it was made to"


def test_dropout_of_adapters_stays(tmp_path: Path) -> None:
    source = save(tmp_path, build(MODELS["gpt2 with dropout"][0]))
    model = load_policy(source, "fp32", LoraParams(rank=2, dropout=0.5), dropout=False)
    assert cannot_share(model) == "dropout above 0"


def spoken(config: Any) -> Any:
    """The configuration with room for a byte's tokens, and some that the tokenizer does not know."""
    config = copy.deepcopy(config)
    config.vocab_size = 300
    return config


@pytest.mark.parametrize("name", ["mistral sliding", "bloom", "falcon alibi", "gemma2", "gpt2 with dropout"])
def test_pairs_are_judged_after_the_run_as_they_were_before(tmp_path: Path, name: str) -> None:
    """Nothing is learned here, so the held-out drift is nought in whatever layout the model wants."""
    source = save(tmp_path / "model", build(spoken(MODELS[name][0])))
    rows = write_pairs(tmp_path / "rows.jsonl", 6)
    params = {
        "algorithm": "dpo", "steps": 1, "prompts": 6, "lr": 1e-12, "lora": {"rank": 2}, "precision": "fp32",
        "engine": {"backend": "torch"}, "max_prompt": 60, "preference": {"max_length": 100},
    }  # fmt: skip
    path = workdir(tmp_path / "run", "preference", params, {"model": source, "pairs": rows, "test": rows})
    result = run_program(preference.main, path)
    assert result["kl"] == pytest.approx(0.0, abs=1e-9)
    assert result["accuracy_after"] == result["accuracy_before"] == 0.5


@pytest.mark.parametrize("name", ["gpt2 with dropout", "mamba", "gemma2", "qwen2-moe"])
def test_a_run_on_policy_starts_at_ratio_1_and_kl_0(tmp_path: Path, name: str) -> None:
    source = save(tmp_path / "model", build(spoken(MODELS[name][0])))
    prompts = [Prompt(prompt=prompt(f"say {n}"), id=str(n), group=str(n)) for n in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(map(to_line, prompts)), encoding="utf-8")
    scorer = {"kind": "function", "name": "f", "path": "tests.training.scorer:vowels"}
    params = {
        "algorithm": "ppo", "steps": 1, "prompts": 2, "group": 2, "max_new_tokens": 6, "held_out": 0,
        "temperature": 0.7, "lora": None, "precision": "fp32", "engine": {"backend": "torch"},
        "max_prompt": 60, "rewards": {"scorers": [scorer]},
    }  # fmt: skip
    path = workdir(tmp_path / "run", "rl", params, {"model": source, "prompts": tmp_path / "prompts.jsonl"})
    run_program(rl.main, path)
    start = json.loads((path / "journal.jsonl").read_text().splitlines()[0])
    assert start["preflight"]["ratio"] == start["preflight"]["reference"] == 0.0
    assert start["preflight"]["generator"] < 1e-4


@pytest.mark.parametrize(
    ("name", "message"),
    [("mamba", "MambaForCausalLM can't have these"), ("qwen3-next", "on Qwen3NextForCausalLM's experts")],
)
def test_adapters_that_do_not_fit_a_model_are_refused(tmp_path: Path, name: str, message: str) -> None:
    source = save(tmp_path, build(MODELS[name][0]))
    with pytest.raises(ConfigurationError, match=f"lora.target: all-linear: .*{message}.*lora: null"):
        load_policy(source, "fp32", LoraParams(rank=2))


@pytest.mark.parametrize("name", ["xlstm", "qwen3-next"])
def test_a_trunk_without_a_cache_that_works_is_scored(tmp_path: Path, name: str) -> None:
    assert load_backbone(save(tmp_path, build(MODELS[name][0])))[1] == "causal"


@pytest.mark.parametrize("layers", [None, 1])
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "llama 4 text"])
def test_adapters_of_a_mixture_leave_experts_alone_and_are_published(
    tmp_path: Path, name: str, layers: int | None
) -> None:
    source = save(tmp_path / "base", build(spoken(MODELS[name][0])))
    model = load_policy(source, "fp32", LoraParams(rank=2, layers=layers))
    learned = [key for key, parameter in model.named_parameters() if parameter.requires_grad]
    assert learned and not any(part in key for key in learned for part in ("experts", ".gate.", "router"))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.1)
    merge_and_save(model, byte_tokenizer(), tmp_path / "model", torch.float32)
    made = BuiltinGenerator(model, [1], 1).generate([[3, 4]], 2, max_new_tokens=3, temperature=1.0)
    batch = collate([Tree("", [3, 4], made.answers[0])], 1, shared=False)
    for each in (model, load_causal(tmp_path / "model", torch.float32)):
        logp, _ = answer_logprobs(each.eval(), batch)
        drawn = torch.tensor([value for row in made.logp[0] for value in row])
        assert torch.allclose(logp[batch.mask], drawn, atol=1e-4)
