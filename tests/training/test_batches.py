from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MistralConfig, MistralForCausalLM

from tests.training.tiny import gpt2, llama
from training.batches import (
    Tree,
    cannot_share,
    collate,
    deal,
    epoch_order,
    fill,
    plan,
    row_lengths,
    step_rows,
    steps_per_epoch,
)

lengths = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=4), min_size=1, max_size=25)


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(1, 200), st.booleans())
def test_micro_batches_hold_each_item_once_and_keep_the_budget(
    rows: list[list[int]], budget: int, padded: bool
) -> None:
    batches = fill(rows, budget, padded)
    assert sorted(index for batch in batches for index in batch) == list(range(len(rows)))
    for batch in batches:
        cost = sum(len(rows[index]) for index in batch) * max(max(rows[index]) for index in batch)
        if not padded:
            cost = sum(sum(rows[index]) for index in batch)
        assert len(batch) == 1 or cost <= budget
    longest = [max(max(rows[index]) for index in batch) for batch in batches]
    assert longest == sorted(longest, reverse=True), "the worst case comes first"
    assert fill(rows, budget, padded) == batches


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 4))
def test_all_ranks_enter_equally_often_and_each_batch_counts_once(count: int, world: int) -> None:
    batches = [[index] for index in range(count)]
    shares = [deal(batches, rank, world) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(b[0] for share in shares for b, real in share if real) == list(range(count))


def test_order_is_a_pure_function_of_seed_and_epoch() -> None:
    assert epoch_order(50, seed=0, epoch=3) == epoch_order(50, seed=0, epoch=3)
    assert epoch_order(50, seed=0, epoch=0) != epoch_order(50, seed=0, epoch=1)
    assert epoch_order(50, seed=0, epoch=0) != epoch_order(50, seed=1, epoch=0)
    assert sorted(epoch_order(50, seed=7, epoch=2)) == list(range(50))


def test_steps_walk_through_an_epoch_with_a_short_last_batch() -> None:
    assert steps_per_epoch(10, 4) == 3
    rows = [step_rows(10, 4, seed=5, step=step) for step in range(6)]
    assert [len(part) for part in rows] == [4, 4, 2, 4, 4, 2]
    assert sorted(rows[0] + rows[1] + rows[2]) == list(range(10)) == sorted(rows[3] + rows[4] + rows[5])


TREES = [Tree("a", [5, 6, 7], [[8, 1], [9, 9, 1]]), Tree("b", [4], [[1]])]


def test_layout_of_separate_rows() -> None:
    batch = collate(TREES, pad_id=1, shared=False)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 1, 1], [5, 6, 7, 9, 9, 1], [4, 1, 1, 1, 1, 1]]
    assert batch.padding.sum(1).tolist() == [1, 0, 4] and batch.layout is None and batch.tokens == 13
    assert batch.mask.sum(1).tolist() == [2, 3, 1], "an EOS counts although pad has the same id"
    assert batch.targets[batch.mask].tolist() == [8, 1, 9, 9, 1, 1]
    assert batch.source[batch.mask].tolist() == [2, 3, 8, 9, 10, 12]
    assert batch.last.tolist() == [4, 11, 13] and batch.tree.tolist() == [0, 0, 1]


def test_layout_of_shared_prompts() -> None:
    batch = collate(TREES, pad_id=1, shared=True)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 1, 9, 9, 1, 4, 1]], "one row, no padding"
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 4, 5, 0, 1]]
    assert not bool(batch.padding.any()) and batch.tokens == 10
    assert batch.source[batch.mask].tolist() == [2, 3, 2, 5, 6, 8]
    assert batch.targets[batch.mask].tolist() == [8, 1, 9, 9, 1, 1]
    assert batch.last.tolist() == [4, 7, 9] and batch.tree.tolist() == [0, 0, 1]
    assert batch.layout == ((3, 2, 3), (1, 1))


def test_row_lengths_count_the_prompt_once_when_shared() -> None:
    assert row_lengths(TREES[0], shared=True) == [8] and row_lengths(TREES[0], shared=False) == [5, 6]
    assert plan(TREES, 9, shared=True) == [[0], [1]] and plan(TREES, 10, shared=True) == [[0, 1]]


def test_moving_keeps_everything() -> None:
    batch = collate(TREES, pad_id=1, shared=True)
    moved = batch.to(torch.device("cpu"))
    assert moved.tokens == batch.tokens and torch.equal(moved.source, batch.source)


def test_who_can_not_share_a_prompt() -> None:
    assert cannot_share(llama()) is None and cannot_share(gpt2()) is None
    assert "dropout" in str(cannot_share(llama(attention_dropout=0.1)))
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=16,
    )  # fmt: skip
    assert "sliding" in str(cannot_share(MistralForCausalLM(config)))
    assert "no config" in str(cannot_share(torch.nn.Linear(2, 2)))


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention"])
def test_an_attention_without_4d_masks_can_not_share(implementation: str) -> None:
    model = llama()
    model.config._attn_implementation = implementation
    assert "4-D mask" in str(cannot_share(model))
