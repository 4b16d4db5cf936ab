"""Hidden states of frozen lower layers, computed once: by the generator, for every later pass.

With adapters on the last k of L layers only, what enters layer L - k of a given token never changes, and the
generator has computed it already. Recorded there, it is given to the reference's and the policy's pass, which
then cost k / L of a forward pass each. An answer's last token is never read by the generator, and nothing
reads its state: it stays zero.

Whether a model lets itself be entered in the middle is tried at the start of a run (preflight), not assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from training.batches import Batch, Tree, cannot_share
from training.logprobs import backbone_and_head
from training.models import is_lora

States = Float[Tensor, "S H"]
"""Of one tree: its prompt's tokens, then its answers', one after the other."""


class Trunk:
    """The layers of one model below its first adapter."""

    def __init__(self, backbone: Any, depth: int) -> None:
        self._backbone = backbone
        self._depth = depth
        self._seen: list[Tensor] | None = None

    @classmethod
    def of(cls, model: Any) -> Trunk | None:
        """The trunk of a model, None where there is none, or nothing that could be entered in the middle."""
        if not is_lora(model) or cannot_share(model) is not None:
            return None
        backbone, _ = backbone_and_head(model)
        layers = getattr(backbone, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            return None
        inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
        if any(parameter.requires_grad and id(parameter) not in inside for parameter in model.parameters()):
            return None
        trained = [any(p.requires_grad for p in layer.parameters()) for layer in layers]
        depth = trained.index(True) if True in trained else 0
        return cls(backbone, depth) if depth else None

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Collects what enters the first trained layer, a tensor [B, T, H] a forward pass."""
        seen: list[Tensor] = []

        def look(layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            hidden = arguments[0] if arguments else named["hidden_states"]
            seen.append(hidden.detach())

        handle = self._backbone.layers[self._depth].register_forward_pre_hook(look, with_kwargs=True)
        try:
            yield seen
        finally:
            handle.remove()

    @contextmanager
    def entered(self, hidden: Float[Tensor, "B T H"] | None) -> Iterator[None]:
        """Forward passes start from these states instead of ids; None: as usual."""
        if hidden is None:
            yield
            return
        whole = self._backbone.layers

        def enter(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            return arguments, {**named, "input_ids": None, "inputs_embeds": hidden}

        handle = self._backbone.register_forward_pre_hook(enter, with_kwargs=True)
        self._backbone.layers = nn.ModuleList(list(whole)[self._depth :])
        try:
            yield
        finally:
            self._backbone.layers = whole
            handle.remove()


def lay_out(
    trees: Sequence[Tree], states: Sequence[States], batch: Batch, shared: bool
) -> Float[Tensor, "B T H"]:
    """States of some trees in the layout of their batch, zeros on padding."""
    where = batch.input_ids.device
    if shared:
        return torch.cat(list(states)).to(where)[None]
    shape = (*batch.input_ids.shape, states[0].shape[1])
    hidden = torch.zeros(shape, dtype=states[0].dtype, device=where)
    row = 0
    for tree, known in zip(trees, states, strict=True):
        prompt, at = len(tree.prompt), len(tree.prompt)
        for answer in tree.answers:
            hidden[row, :prompt] = known[:prompt]
            hidden[row, prompt : prompt + len(answer)] = known[at : at + len(answer)]
            at += len(answer)
            row += 1
    return hidden


def gather_states(
    prompts: Sequence[Tensor],
    steps: Sequence[Tensor],
    lengths: Sequence[Sequence[int]],
    rows: Sequence[Tensor],
) -> list[States]:
    """States of each prompt and of its answers, put together as trees.

    prompts: one a prompt; steps: what `recording` saw of each token after them; rows: which answers each step
    went on with; lengths: tokens of each prompt's answers.
    """
    group = len(lengths[0])
    longest = max(max(each) for each in lengths)
    tokens = prompts[0].new_zeros(len(prompts) * group, longest, prompts[0].shape[1])
    for position, (step, going) in enumerate(zip(steps, rows, strict=True)):
        tokens[going, position] = step[:, 0]
    return [
        torch.cat([prompt, *(tokens[index * group + n, :length] for n, length in enumerate(lengths[index]))])
        for index, prompt in enumerate(prompts)
    ]
