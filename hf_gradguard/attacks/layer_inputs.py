"""Inputs of a model's linear layers: a weight's gradient is δᵀX, with X the layer's inputs.

Layers are found by running the model and not by their names, so that encoders, decoders, fused
projections and LoRA are treated the same.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D

from ..gradient_map.domain import TEXT, is_encoder_decoder
from ..gradient_map.replay import hooked
from ..models import without_adapters
from .base import Observation, ordinary_id, without_dropout


@dataclass(frozen=True)
class Projections:
    """A group of linear layers that read the same input.

    Args:
        modules: The layers.
        names: The names of the layers' weights, in the same order.
        mixing: What the input at a position depends on: `"none"`, only the token there (and its
            position); `"causal"`, the tokens up to there; `"full"`, other tokens too.
        positional: Whether one token gives different inputs at different positions.
        call: Which of a pass's calls of the layers this is: blocks may share their weights.
        calls: How many calls there are. Their inputs share one gradient, and so one row space.
        pooled: Whether they read one input per text, and not one per position.

    Example:
        >>> projections = find_projections(observation)[0]
        >>> names = [name.split(".")[-2] for name in projections.names]
        >>> names, projections.mixing, projections.positional
        (['query', 'key', 'value'], 'none', True)
    """

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    mixing: str
    positional: bool
    call: int = 0
    calls: int = 1
    pooled: bool = False

    def gradients(self, observation: Observation) -> list[Tensor]:
        """Return the gradient δᵀX of every layer, `(out, in)`."""
        return [self.as_rows(i, observation.gradient[name]) for i, name in enumerate(self.names)]

    def as_rows(self, index: int, tensor: Tensor) -> Tensor:
        """Return a tensor in the shape of a layer's weight as `(out, in)`.

        The weight of GPT-2's Conv1D is transposed.
        """
        return tensor.T if isinstance(self.modules[index], Conv1D) else tensor

    @property
    def num_rows(self) -> int:
        """The number of rows of their gradients, stacked."""
        return sum(len(self.as_rows(i, m.weight)) for i, m in enumerate(self.modules))  # type: ignore[arg-type, misc]

    @property
    def max_rank(self) -> int:
        """The most tokens that their gradients can distinguish: the smaller of rows and columns."""
        return min(self.num_rows, self.width)

    @property
    def width(self) -> int:
        """The number H of entries of their input."""
        return int(self.as_rows(0, self.modules[0].weight).shape[1])  # type: ignore[arg-type]

    def has_shapes_of(self, projections: Projections) -> bool:
        """Return whether these are the same layers of another block."""
        return [m.weight.shape for m in self.modules] == [
            m.weight.shape for m in projections.modules
        ]


def find_projections(observation: Observation) -> list[Projections]:
    """Return the linear layers whose gradient was shared, grouped by the input that they read.

    They are in the order in which they run. Layers that run several times a pass are there once for
    every call.

    Example:
        >>> sorted({group.mixing for group in find_projections(observation)})  # of an encoder
        ['full', 'none']
    """
    parameters = dict(observation.model.named_parameters())
    names = {id(parameters[name]): name for name, g in observation.gradient.items() if g.any()}
    linear = [m for m in observation.model.modules() if isinstance(m, (nn.Linear, Conv1D))]
    modules = {m: names[id(m.weight)] for m in linear if id(m.weight) in names}
    token, other_token = two_tokens(observation)
    closing_ids = _closing_ids(observation)
    recorded_passes = [
        _all_inputs(observation, list(modules), [*ids, *closing_ids])
        for ids in ([token] * 3, [token, other_token, token])
    ]
    length, calls = 3 + len(closing_ids), Counter(module for module, _ in recorded_passes[0])
    layers_by_input: list[tuple[Tensor, Tensor, int, list[nn.Module]]] = []
    for (module, call), inputs in recorded_passes[0].items():
        changed_inputs = recorded_passes[1].get((module, call), inputs)
        if inputs.shape != changed_inputs.shape or inputs.shape[:-1] not in ((1, length), (1,)):
            continue
        for x, changed_x, layers_call, layers in layers_by_input:
            same_call = layers_call == call and calls[layers[0]] == calls[module]
            if (
                same_call
                and torch.equal(x, inputs[0])
                and torch.equal(changed_x, changed_inputs[0])
            ):
                layers.append(module)
                break
        else:
            layers_by_input.append((inputs[0], changed_inputs[0], call, [module]))
    groups = []
    for inputs, changed_inputs, call, layers in layers_by_input:
        pooled = inputs.dim() == 1
        changed = [not torch.equal(a, b) for a, b in zip(inputs, changed_inputs, strict=True)]
        # What does not follow the tokens' places is a decoder's side of an encoder-decoder.
        if not (any(changed) if pooled else changed[1]):
            continue
        mixing = "full" if pooled or changed[0] else "causal" if changed[2] else "none"
        positional = not pooled and not torch.allclose(
            inputs[0], inputs[2], rtol=1e-5, atol=1e-6 * float(inputs.abs().max())
        )
        names_of_layers = tuple(modules[layer] for layer in layers)
        kind = tuple(layers), names_of_layers, mixing, positional
        groups.append(Projections(*kind, call, calls[layers[0]], pooled))
    return groups


def layer_inputs(
    observation: Observation,
    projections: Projections,
    ids: Tensor,
    mask: Tensor | None = None,
    **extra: Any,
) -> Tensor:
    """Return the inputs of `projections` when the model runs on candidates, `(B, T, H)`.

    The pass stops there.

    Args:
        observation: The observation of the server.
        projections: The layers.
        ids: Token ids, `(B, T)`.
        mask: The attention mask, `(B, T)`; default: all ones.
        **extra: Further inputs of the model.

    Example:
        >>> inputs = layer_inputs(seen, find_projections(seen)[0], batch["input_ids"])
        >>> inputs.shape == gmap.input.shape
        True
    """
    return all_inputs(observation, [projections], ids, mask, **extra)[0]


def all_inputs(
    observation: Observation,
    groups: list[Projections],
    ids: Tensor,
    mask: Tensor | None = None,
    **extra: Any,
) -> list[Tensor]:
    """Return the inputs of several groups of layers in one pass, which stops behind the last.

    Args:
        observation: The observation of the server.
        groups: The groups of layers.
        ids: Token ids, `(B, T)`.
        mask: The attention mask, `(B, T)`; default: all ones.
        **extra: Further inputs of the model.

    Example:
        >>> groups = find_projections(observation)[:2]
        >>> [x.shape == gmap.input.shape for x in all_inputs(seen, groups, batch["input_ids"])]
        [True, True]
    """
    recorded: dict[int, Tensor] = {}
    counts: Counter[nn.Module] = Counter()

    def record(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        for index, projections in enumerate(groups):
            if projections.modules[0] is module and projections.call == counts[module]:
                recorded[index] = args[0]
        counts[module] += 1
        if len(recorded) == len(groups):
            raise _Stop

    modules = dict.fromkeys(projections.modules[0] for projections in groups)
    hooks = hooked(module.register_forward_pre_hook(record) for module in modules)
    with hooks, suppress(_Stop):
        run(observation, ids, mask, **extra)
    return [recorded[index] for index in range(len(groups))]


def is_causal_lm(model: nn.Module) -> bool:
    """Return whether the loss is over next tokens, so that a text's last one does not count.

    Example:
        >>> is_causal_lm(model)  # a classifier
        False
    """
    return _class_name(model) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


class _Stop(Exception):
    """A forward pass ends here, since its rest is not needed."""


def run(observation: Observation, ids: Tensor, mask: Tensor | None = None, **extra: Any) -> None:
    """Run the model on candidates, without dropout, so that hooks see the pass.

    Args:
        observation: The observation of the server.
        ids: Token ids, `(B, T)`.
        mask: The attention mask, `(B, T)`; default: all ones.
        **extra: Further inputs of the model.

    Example:
        >>> lengths = []
        >>> def note(module, args):
        ...     lengths.append(args[0].shape[1])
        >>> handle = model.get_input_embeddings().register_forward_pre_hook(note)
        >>> run(observation, torch.tensor([[5, 6, 7]]))
        >>> lengths
        [3]
    """
    mask = torch.ones_like(ids) if mask is None else mask.long()
    batch = {"input_ids": ids, "attention_mask": mask}
    # Translation models decode another text, which says nothing here; classifiers the same one.
    if _class_name(observation.model) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values():
        batch["decoder_input_ids"] = torch.full_like(
            ids[:, :1], ordinary_id(observation.model, observation.tokenizer)
        )
    with torch.no_grad(), without_dropout(observation.model):
        observation.model(**batch, **extra)


def _class_name(model: nn.Module) -> str:
    return type(without_adapters(model)).__name__


def _closing_ids(observation: Observation) -> list[int]:
    """Return the ids that a synthetic text must end with for the model to run to its end.

    Classifiers of encoder-decoders read their output at the end-of-sequence token.
    """
    end = getattr(getattr(observation.model, "config", None), "eos_token_id", None)
    return [int(end)] if is_encoder_decoder(observation.model) and end is not None else []


def _all_inputs(
    observation: Observation, modules: list[nn.Module], ids: list[int]
) -> dict[tuple[nn.Module, int], Tensor]:
    """Return the input of each module at each of its calls, in order."""
    inputs: dict[tuple[nn.Module, int], Tensor] = {}
    counts: Counter[nn.Module] = Counter()

    def watch(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs[module, counts[module]] = args[0]
        counts[module] += 1

    with hooked(module.register_forward_pre_hook(watch) for module in modules):
        run(observation, torch.tensor([ids], device=observation.device))
    return inputs


def two_tokens(observation: Observation) -> tuple[int, int]:
    """Return two ids with different embeddings, neither of them special if possible.

    Example:
        >>> token, other_token = two_tokens(observation)
        >>> token != other_token
        True
    """
    weight: Tensor = TEXT.embedding(observation.model).weight  # type: ignore[assignment]
    token = ordinary_id(observation.model, observation.tokenizer)
    padding = getattr(getattr(observation.model, "config", None), "pad_token_id", None)
    distances = (weight.detach() - weight.detach()[token]).square().sum(1)
    if padding is not None and 0 <= padding < len(distances):
        distances[padding] = -1
    return token, int(distances.argmax())


def attended_positions(observation: Observation) -> Tensor:
    """Return a mask `(B, T)` of positions whose inputs the loss depends on.

    They are all tokens except, in a causal language model, each text's last.

    Raises:
        ValueError: If there are none.

    Example:
        >>> bool((attended_positions(observation) <= observation.tokens).all())
        True
    """
    attended = observation.tokens.clone()
    if is_causal_lm(observation.model):
        for row in attended:
            row[row.nonzero()[-1:]] = False
    if not attended.any():
        raise ValueError(
            "No position is left to look for: the texts have no tokens that the loss depends on."
        )
    return attended


@dataclass(frozen=True)
class Slots:
    """The places where a batch's tokens are looked for, and the ids that may stand there.

    Args:
        attended: A mask `(B, T)` of the tokens that the loss depends on.
        known_ids: Ids that are known beforehand, `(B, T)`, -1 elsewhere.
        candidate_ids: Ids by position, the best first; only under 0 if the model has no positions.

    Example:
        >>> slots = Slots(torch.ones(2, 3).bool(), torch.tensor([[2, -1, 3], [2, -1, 3]]))
        >>> slots.is_unknown[0].tolist(), len(slots.known_pairs(positional=True))
        ([False, True, False], 2)
        >>> [tensor.tolist() for tensor in slots.capacity(positional=True)]
        [[1], [2]]
    """

    attended: Tensor
    known_ids: Tensor
    candidate_ids: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def from_observation(cls, observation: Observation) -> Slots:
        """Return all attended positions as slots, with special tokens as known ids."""
        attended = attended_positions(observation)
        return cls(attended, observation.known_ids().masked_fill(~attended, -1))

    @property
    def is_unknown(self) -> Tensor:
        """The mask `(B, T)` of places where a token is looked for."""
        return self.attended & (self.known_ids < 0)

    def known_pairs(self, positional: bool) -> Tensor:
        """Return the known tokens `(k, 2)`, each position with its id.

        Equal ones give equal inputs, and are there once. Without positions all stand at 0.
        """
        rows, columns = (self.known_ids >= 0).nonzero(as_tuple=True)
        positions = columns if positional else torch.zeros_like(columns)
        return torch.stack([positions, self.known_ids[rows, columns]], -1).unique(dim=0)

    def capacity(self, positional: bool) -> tuple[Tensor, Tensor]:
        """Return the positions at which to look, and for how many tokens at each.

        Without positions everything is in one place.
        """
        counts = self.is_unknown.sum(0) if positional else self.is_unknown.sum().reshape(1)
        return counts.nonzero().flatten(), counts[counts > 0]


def observed_length(observation: Observation) -> int | None:
    """Return the number of tokens in the batch's longest text, special tokens included.

    Only positions at which some text has a token have a gradient; padding has none. Under noise,
    the rows of positions that cannot have been used (from T on) tell its size.

    Args:
        observation: The observation of the server; only its T must be at least the length.

    Returns:
        The length; `None` if the model learns no position embeddings, their gradient was not
            shared, or noise covers it.

    Example:
        >>> observed_length(observation) == int(batch["attention_mask"].sum(1).max())
        True
    """
    tokens = observation.domain.embedding(observation.model)
    if tokens is None:  # pixels
        return None
    position_rows = _position_gradient(observation, tokens)
    if position_rows is None:
        return None
    gradient, offset = position_rows
    norms = gradient.norm(dim=1)[offset:]
    size = observation.input_shape[1]
    floor = 1.5 * float(norms[size:].max()) if len(norms) > size else 0.0
    used = (norms[:size] > floor).nonzero()
    if not len(used):
        return None
    return int(used.max()) + 1 + int(is_causal_lm(observation.model))


def with_length(observation: Observation) -> Observation:
    """Return the observation, cut to the longest text's length if the gradient tells it.

    It is unchanged if the lengths were granted. A row without entries says nothing in what was
    pruned, so nothing is read there. Token embeddings do not tell: they have no gradient for most
    words anyway.

    Example:
        >>> from dataclasses import replace
        >>> padded = replace(observation, input_shape=(2, 12), attention_mask=None)
        >>> with_length(padded).input_shape
        (2, 8)
    """
    if observation.attention_mask is not None or len(observation.input_shape) != 2:
        return observation
    length = None if _is_pruned(observation) else observed_length(observation)
    if length is None or length >= observation.input_shape[1]:
        return observation
    labels = observation.labels
    if labels is not None and labels.dim() > 1 and labels.shape == observation.input_shape:
        labels = labels[:, :length]
    return replace(observation, input_shape=(observation.batch_size, length), labels=labels)


def _is_pruned(observation: Observation) -> bool:
    words = getattr(observation.domain.embedding(observation.model), "weight", None)
    token_embedding_names = {
        name for name, p in observation.model.named_parameters() if p is words
    }  # a tied head's as well
    counted_names = observation.gradient.keys() - token_embedding_names
    counted = [observation.gradient[name] for name in counted_names]
    nonzero = sum(int(tensor.count_nonzero()) for tensor in counted)
    return nonzero <= sum(tensor.numel() for tensor in counted) / 2


def _position_gradient(observation: Observation, tokens: nn.Module) -> tuple[Tensor, int] | None:
    """Return the gradient of the embedding that is read at consecutive rows, and its first row."""
    shared = observation.gradient
    names = {id(p): name for name, p in observation.model.named_parameters() if name in shared}
    recorded: dict[nn.Module, Tensor] = {}
    tables = [m for m in observation.model.modules() if isinstance(m, nn.Embedding)]
    modules = [m for m in tables if m is not tokens and id(m.weight) in names]

    def record(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args:
            recorded[module] = args[0]

    token = ordinary_id(observation.model, observation.tokenizer)
    with hooked(module.register_forward_pre_hook(record) for module in modules):
        run(observation, torch.full((1, 3), token, device=observation.device))
    for module, position_ids in recorded.items():
        rows = position_ids.flatten().tolist()
        if len(rows) == 3 and rows == list(range(rows[0], rows[0] + 3)):
            return observation.gradient[names[id(module.weight)]], int(rows[0])
    return None
