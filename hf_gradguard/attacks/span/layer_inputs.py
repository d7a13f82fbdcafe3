"""Which of a model's weights read what: a linear layer's weight gradient is δᵀX, and X are its
inputs.

Found by running the model and not by the layers' names, so that encoders, decoders, fused
projections and LoRA are alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from ...gradient_map.domain import TEXT
from ..observation import Observation, ordinary_id, without_dropout


@dataclass(frozen=True)
class Readers:
    """Linear layers that read the same input.

    Args:
        modules: The layers.
        names: Their weights' names, in the same order.
        mixing: On what the input at a position depends: `"none"`, on the token there (and its
            position) alone; `"causal"`, on the tokens up to there; `"full"`, on others too.
        positional: Whether one token gives different inputs at different positions.

    Example:
        >>> first = find_readers(seen)[0]
        >>> [name.split(".")[-2] for name in first.names], first.mixing, first.positional
        (['query', 'key', 'value'], 'none', True)
    """

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    mixing: str
    positional: bool

    def gradients(self, seen: Observation) -> list[Tensor]:
        """δᵀX of every layer: `(out, in)`."""
        return [self.like_rows(i, seen.gradient[name]) for i, name in enumerate(self.names)]

    def like_rows(self, index: int, tensor: Tensor) -> Tensor:
        """A tensor in the shape of a layer's weight as `(out, in)`: GPT-2's Conv1D has it the other
        way round.
        """
        return tensor.T if isinstance(self.modules[index], Conv1D) else tensor

    @property
    def size(self) -> tuple[int, int]:
        """How many tokens their gradients can tell apart, the smaller of rows and columns; and the
        rows.
        """
        shapes = [self.like_rows(i, m.weight).shape for i, m in enumerate(self.modules)]  # type: ignore[arg-type]
        rows = sum(shape[0] for shape in shapes)
        return min(rows, shapes[0][1]), rows

    def like(self, other: Readers) -> bool:
        """Whether these are the same layers of another block."""
        return [m.weight.shape for m in self.modules] == [m.weight.shape for m in other.modules]


def find_readers(seen: Observation) -> list[Readers]:
    """The linear layers whose gradient was shared, grouped by what they read, in the order in which
    they run.

    Layers that run more than once a pass are left out: their gradient is a sum over different
    inputs.

    Example:
        >>> sorted({readers.mixing for readers in find_readers(seen)})  # of an encoder
        ['full', 'none']
    """
    names = {
        id(p): name
        for name, p in seen.model.named_parameters()
        if seen.gradient.get(name, torch.zeros(1)).any()
    }
    modules = {
        module: names[id(module.weight)]
        for module in seen.model.modules()
        if isinstance(module, (nn.Linear, Conv1D)) and id(module.weight) in names
    }
    first, other = _two_tokens(seen)
    passes = [_all_inputs(seen, list(modules), ids) for ids in ([first] * 3, [first, other, first])]
    found: list[tuple[Tensor, Tensor, list[nn.Module]]] = []
    for module, inputs in passes[0].items():
        if len(inputs) != 1 or inputs[0].dim() != 3 or inputs[0].shape[:2] != (1, 3):
            continue
        before, after = inputs[0][0], passes[1][module][0][0]
        for group in found:
            if torch.equal(group[0], before) and torch.equal(group[1], after):
                group[2].append(module)
                break
        else:
            found.append((before, after, [module]))
    groups = []
    for before, after, members in found:
        changed = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        if not changed[
            1
        ]:  # does not read the input ids at all: a decoder's side of an encoder-decoder
            continue
        mixing = "full" if changed[0] else "causal" if changed[2] else "none"
        positional = not torch.allclose(
            before[0], before[2], rtol=1e-5, atol=1e-6 * float(before.abs().max())
        )
        groups.append(
            Readers(tuple(members), tuple(modules[m] for m in members), mixing, positional)
        )
    return groups


def layer_inputs(
    seen: Observation, readers: Readers, ids: Tensor, mask: Tensor | None = None
) -> Tensor:
    """What `readers` read when the model runs on candidates: `(B, T, H)`. The pass stops there.

    Args:
        ids: `(B, T)` token ids.
        mask: `(B, T)`; default: all ones.

    Example:
        >>> layer_inputs(seen, find_readers(seen)[0], batch["input_ids"]).shape == gmap.input.shape
        True
    """
    caught: list[Tensor] = []

    def stop(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        caught.append(args[0])
        raise _Stop

    handle = readers.modules[0].register_forward_pre_hook(stop)
    try:
        run(seen, ids, mask)
    except _Stop:
        pass
    finally:
        handle.remove()
    return caught[0]


def is_causal_lm(model: nn.Module) -> bool:
    """Whether the loss is over next tokens, so that it does not depend on a text's last one.

    Example:
        >>> is_causal_lm(model)  # a classifier
        False
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


class _Stop(Exception):
    """Ends a forward pass whose rest is not needed."""


def run(seen: Observation, ids: Tensor, mask: Tensor | None = None) -> None:
    """A forward pass of the model on candidates, without dropout, for what hooks see of it.

    Example:
        >>> lengths = []
        >>> def note(module, args):
        ...     lengths.append(args[0].shape[1])
        >>> handle = model.get_input_embeddings().register_forward_pre_hook(note)
        >>> run(seen, torch.tensor([[5, 6, 7]]))
        >>> lengths
        [3]
    """
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids) if mask is None else mask.long(),
    }
    if getattr(getattr(seen.model, "config", None), "is_encoder_decoder", False):
        batch["decoder_input_ids"] = torch.full_like(
            ids[:, :1], ordinary_id(seen.model, seen.tokenizer)
        )
    with torch.no_grad(), without_dropout(seen.model):
        seen.model(**batch)


def _all_inputs(
    seen: Observation, modules: list[nn.Module], ids: list[int]
) -> dict[nn.Module, list[Tensor]]:
    inputs: dict[nn.Module, list[Tensor]] = {}
    with _watching(modules, inputs):
        run(seen, torch.tensor([ids], device=seen.device))
    return inputs


@contextmanager
def _watching(modules: list[nn.Module], inputs: dict[nn.Module, list[Tensor]]) -> Iterator[None]:
    def watch(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs.setdefault(module, []).append(args[0])

    handles = [module.register_forward_pre_hook(watch) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _two_tokens(seen: Observation) -> tuple[int, int]:
    """Two ids with different embeddings, neither of them special if possible."""
    weight: Tensor = TEXT.embedding(seen.model).weight  # type: ignore[assignment]
    first = ordinary_id(seen.model, seen.tokenizer)
    padding = getattr(getattr(seen.model, "config", None), "pad_token_id", None)
    distances = (weight.detach() - weight.detach()[first]).square().sum(1)
    if padding is not None and 0 <= padding < len(distances):
        distances[padding] = -1
    return first, int(distances.argmax())
