"""Recovery of labels from the gradient of the last layer, or of the one below it.

For cross-entropy over C classes the bias gradient of the last layer is mean_b (p_b - y_b): softmax
probabilities minus the one-hot label. With one sample its only negative entry is the label (Zhao,
Mopuri and Bilen, "iDLG", 2020). The weight's gradient is mean_b (p_b - y_b) h_bᵀ with the features
h_b, so its product with mean features says the same, from many more entries: noise averages out.
Its row of a class over the bias gradient of that class gives the features of the samples of that
class, which give their predictions, and so how often each class occurs (Ma et al., "Instance-wise
Batch Label Restoration via Gradients in Federated Learning", 2023).

If the last layer is withheld, the layer below still gets (p - y) through its known weight.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor, nn

from ..gradient_map import GradientMap, Tensors
from ..gradient_map.domain import IMAGE, ends_of, is_encoder_decoder, ordinary_ids, special_ids
from ..models import label_kind
from .base import Observation, without_dropout


def random_inputs(observation: Observation, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw a batch of the shapes that were seen, without labels.

    Example:
        >>> random_inputs(observation, torch.Generator())["input_ids"].shape
        torch.Size([2, 8])
    """
    return _RANDOM[observation.domain.name](observation, generator)


def _random_ids(observation: Observation, generator: torch.Generator) -> dict[str, Tensor]:
    batch = observation.placeholder()
    size = observation.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    words = ordinary_ids(size, _special(observation)).to(observation.device)
    shape, device = observation.input_shape, observation.device
    word_index = torch.randint(len(words), shape, generator=generator, device=device)
    ids = torch.where(observation.known_ids() >= 0, batch["input_ids"], words[word_index])
    return {**batch, "input_ids": _with_end(observation, ids)}


def _special(observation: Observation) -> list[int]:
    """Return ids that are no words: models make masks and places of padding and ends."""
    model = observation.model
    special = {*special_ids(model, observation.tokenizer), *special_ids(model)}
    return sorted(special | set(_ends(observation)))


def _ends(observation: Observation) -> list[int]:
    """Return the ids that end a text, of which some models have several."""
    end = getattr(getattr(observation.model, "config", None), "eos_token_id", None)
    return [] if end is None else list(end) if isinstance(end, list | tuple) else [int(end)]


def _with_end(observation: Observation, ids: Tensor) -> Tensor:
    """Return texts with an end, where no special token of the tokenizer is one.

    Classifiers of encoder-decoders read their output there.
    """
    ends = _ends(observation)
    if ends and is_encoder_decoder(observation.model):
        rows = (~torch.isin(ids, torch.tensor(ends, device=ids.device)).any(1)).nonzero()[:, 0]
        ids[rows, ends_of(observation.tokens)[1][rows]] = ends[0]
    return ids


def _random_pixels(observation: Observation, generator: torch.Generator) -> dict[str, Tensor]:
    template = IMAGE.main_input(observation.placeholder())
    pixels = torch.empty_like(template).uniform_(generator=generator)
    return {IMAGE.key: pixels}


_RANDOM = {"text": _random_ids, "image": _random_pixels}


_DRAWS = 8
_DECODER_TEXTS = 128  # drawn for a decoder, where one position of each counts


def recover_labels(observation: Observation) -> Tensor:
    """Recover class ids `(B,)` from the gradient of the last layer.

    They are exact for one sample whose last layer is undefended, and an estimate in ascending order
    for several.

    Raises:
        ValueError: If the model's last layer gives no class scores, or its gradient was not shared
            (`recover_labels_below` reads the layer below).

    Example:
        >>> from dataclasses import replace
        >>> recover_labels(replace(image_observation, labels=None)).shape
        torch.Size([2])
    """
    slope = last_layer_slope(observation)
    if observation.batch_size == 1:
        return slope.argmin()[None]
    head = _Head.from_observation(observation)
    predictions = _predictions(observation, head, slope)
    # Σ_c n_c (P_c - e_c) = B slope for counts n, with P_c the mean prediction of class c's samples
    system = (predictions.T - torch.eye(len(slope), device=slope.device)).double()
    system = torch.cat([system, torch.ones_like(system[:1])])
    target = torch.cat([slope, torch.ones_like(slope[:1])]).double() * observation.batch_size
    return _as_labels(_non_negative(system, target), observation)


def recover_labels_below(observation: Observation) -> Tensor:
    """Recover class ids `(B,)` without the last layer's gradient.

    The gradient of the last layer that was shared is compared to what it is at the attacker's own
    inputs with each label.

    Raises:
        ValueError: If the model's last layer gives no class scores.

    Example:
        >>> from dataclasses import replace
        >>> below = {n: g for n, g in seen.gradient.items() if not n.startswith("classifier")}
        >>> recover_labels_below(replace(observation, gradient=below)).shape
        torch.Size([2])
    """
    _, classes = _last_parameter(observation)
    head_modules = {name.rpartition(".")[0] for name in _Head.names(observation)}
    names = [name for name, gradient in observation.gradient.items() if gradient.any()]
    names = [name for name in names if name.rpartition(".")[0] not in head_modules]
    if not names:
        raise ValueError("Nothing below the last layer was shared. Pass labels to the Observation.")
    module = names[-1].rpartition(".")[0]
    names = [name for name in names if name.rpartition(".")[0] == module]
    shared = torch.cat([observation.gradient[name].flatten() for name in names]).double()
    generator, columns = _seeded_generator(observation), []
    with _evaluating(observation.model):
        for label in range(classes):
            total = torch.zeros_like(shared)
            for _ in range(_DRAWS):
                labels = torch.full((observation.batch_size,), label, device=observation.device)
                batch = random_inputs(observation, generator) | {"labels": labels}
                gradient = GradientMap(
                    observation.model, batch, share_input_embeddings=True, second_order=False
                ).gradient()
                total += torch.cat([gradient[name].flatten() for name in names]).double() / _DRAWS
            columns.append(total)
    directions = torch.stack(columns)
    if observation.batch_size == 1:
        return torch.cosine_similarity(directions, shared[None]).argmax()[None]
    size = directions.norm(dim=1).mean().clamp_min(1e-30)
    system = torch.cat([directions.T / size, torch.ones(1, classes, device=observation.device)])
    target = torch.cat([shared / size, torch.ones(1, device=observation.device)])
    counts = _non_negative(system.double(), target.double()) * observation.batch_size
    return _as_labels(counts, observation)


def check_classes(observation: Observation) -> None:
    """Refuse models whose labels are not a single class a sample.

    Raises:
        ValueError: If they are not; the message says what to do instead.

    Example:
        >>> check_classes(observation)
    """
    if (kind := label_kind(observation.model)) != "class":
        raise ValueError(_UNRECOVERABLE[kind])


def last_layer_slope(observation: Observation) -> Tensor:
    """Return mean_b (p_b - y_b), read off the last layer, `(C,)`.

    For one sample without a bias it is known only up to a positive factor. Bias and weight are
    weighed by how sure each is. All rows of the last layer's gradient sum to zero, so what they do
    sum to is noise.

    Raises:
        ValueError: If neither gradient of the last layer was shared.

    Example:
        >>> slope = last_layer_slope(observation)  # softmax minus one-hot sums to zero
        >>> slope.shape, bool(slope.sum().abs() < 1e-5)
        (torch.Size([2]), True)
    """
    last_parameter, classes = _last_parameter(observation)
    weight, bias = _Head.names(observation)
    if not {weight, bias} & observation.gradient.keys():
        raise ValueError(
            f"The gradient of the last layer ({last_parameter}) was not shared. Pass labels to the "
            "Observation, or read the layer below (recover_labels_below)."
        )
    shared = _shared(observation)
    if weight not in shared:
        return shared[bias]
    rows = shared[weight].flatten(1)
    if bias not in shared and observation.batch_size == 1 and classes > 2:
        # Row c is (p - y)_c h. The label's entry is minus the sum of the others, so its row is the
        # longest, and it points away from them.
        return -(rows @ rows[rows.norm(dim=1).argmax()])
    head = _Head.from_observation(observation)
    if head is None:
        if bias in shared:
            return shared[bias]
        raise ValueError(
            f"The last layer ({last_parameter}) has no bias, and is no linear layer of the "
            "features. Pass labels to the Observation."
        )
    if bias not in shared:
        return rows @ head.mean / head.mean.square().sum()
    return _slope_and_features(rows, shared[bias], head, _noise(shared))[0]


def _slope_and_features(
    rows: Tensor, by_bias: Tensor, head: _Head, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the slope of weight and bias together, `(C,)`, and mean features, `(H,)`.

    The batch's mean features are read off the weight's gradient by the slope, as far as they stand
    out of the noise: a trained model's own inputs look different from an attacker's.
    """
    slope, prior = by_bias, head.mean.square().mean().clamp_min(1e-30)
    for _ in range(3):
        size = (slope.square().sum() - len(slope) * noise).clamp_min(0)
        ridge = noise / prior + 1e-12 * slope.square().sum()
        mean = (ridge * head.mean + rows.T @ slope) / (size + ridge).clamp_min(1e-30)
        by_weight = rows @ mean / mean.square().sum().clamp_min(1e-30)
        spread = (head.features @ head.mean / head.mean.square().sum()).var() + 0.02
        uncertainty = noise / mean.square().sum() + spread * by_weight.square().mean()
        fraction = noise / (noise + uncertainty).clamp_min(1e-38)
        slope = fraction * by_weight + (1 - fraction) * by_bias
    return slope, mean


def _shared(observation: Observation) -> Tensors:
    """Return what was shared of the last layer's weight and bias, by name.

    The type is the more precise one of the gradient's and the model's, and at least float32.
    """
    gradient, names = observation.gradient, _Head.names(observation)
    shared = {name: gradient[name] for name in names if name in gradient}
    models = [p.dtype for p in observation.model.parameters() if torch.is_floating_point(p)]
    types = [*models, *(tensor.dtype for tensor in shared.values())]
    dtype = functools.reduce(torch.promote_types, types, torch.float32)
    return {name: tensor.to(dtype) for name, tensor in shared.items()}


@dataclass(frozen=True)
class _Head:
    """The last layer, with features that the attacker's own inputs have in front of it."""

    layer: nn.Linear
    features: Tensor
    """Features `(n, H)` of random inputs in front of the layer."""

    @property
    def mean(self) -> Tensor:
        return self.features.mean(0)

    @staticmethod
    def names(observation: Observation) -> tuple[str, str]:
        """Return the names of the last layer's weight and bias, which may not exist."""
        owner = _last_parameter(observation)[0].rpartition(".")[0]
        prefix = f"{owner}." if owner else ""
        return f"{prefix}weight", f"{prefix}bias"

    @classmethod
    def from_observation(cls, observation: Observation) -> _Head | None:
        """Return the head, or `None` if the last layer is not linear in features `(..., H)`."""
        layer = observation.model.get_submodule(_Head.names(observation)[0].rpartition(".")[0])
        if not isinstance(layer, nn.Linear):
            return None
        features = _random_features(observation, layer)
        shared = next(iter(_shared(observation).values()))
        return cls(layer, torch.cat(features).to(shared)) if features else None


def _random_features(observation: Observation, layer: nn.Linear) -> list[Tensor]:
    """Return features in front of the last layer, each `(n, H)`, of random inputs."""
    head_calls: list[tuple[Tensor, Tensor]] = []
    features: list[Tensor] = []
    hook = layer.register_forward_hook(
        lambda _, args, output: head_calls.append((args[0].detach(), output))
    )
    generator, num_batches, needed_batches = _seeded_generator(observation), 0, _DRAWS
    with hook, torch.no_grad(), _evaluating(observation.model):
        while num_batches < needed_batches:
            num_batches += 1
            head_calls.clear()
            logits = observation.model(**random_inputs(observation, generator)).logits
            for head_inputs, output in head_calls:
                features.append(_counted_features(head_inputs, output, logits))
                if len(features[-1]) < output[..., 0].numel():
                    needed_batches = max(_DRAWS, _DECODER_TEXTS // observation.batch_size)
    return features


def _counted_features(features: Tensor, output: Tensor, logits: Tensor) -> Tensor:
    """Return those features in front of the last layer that logits come from, `(n, H)`.

    A decoder's head runs at every position, and only a text's last one counts.
    """
    if output.dim() == 3 and output.shape[::2] == logits.shape:
        is_counted = torch.isclose(output.to(logits), logits[:, None]).all(-1)
        if bool(is_counted.any(1).all()):
            return features[is_counted]
    return features.flatten(0, -2)


def _predictions(observation: Observation, head: _Head | None, slope: Tensor) -> Tensor:
    """Return P `(C, C)`, the mean prediction for samples of each class.

    If the gradients of weight and bias say that a class occurs, their ratio gives its features, as
    far as they stand out of the noise. Otherwise the features of the attacker's own inputs are
    used.
    """
    weight, bias = _Head.names(observation)
    shared = _shared(observation)
    if head is None or weight not in shared:
        return _mean_prediction(observation).expand(len(slope), -1)
    noise, mean, rows = _noise(shared), head.mean, shared[weight].flatten(1)
    if bias in shared:
        mean = _slope_and_features(rows, shared[bias], head, noise)[1]
    features = mean.expand(len(slope), -1).clone()
    present, feature_power = slope < 0, mean.square().mean()
    ratio = rows[present] / slope[present, None]
    trust = feature_power / (feature_power + noise / slope[present, None].square()).clamp_min(1e-38)
    features[present] = features[present] + trust * (ratio - features[present])
    with torch.no_grad():
        head_bias = None if head.layer.bias is None else head.layer.bias.to(features)
        logits = nn.functional.linear(features, head.layer.weight.to(features), head_bias)
    return logits.softmax(-1)


def _noise(shared: Tensors) -> Tensor:
    """Return the variance of noise on an entry of the last layer's gradient.

    Without noise its rows sum to zero.
    """
    sums = torch.cat([tensor.sum(0).flatten() for tensor in shared.values()])
    return sums.square().mean() / len(next(iter(shared.values())))


def _non_negative(system: Tensor, target: Tensor) -> Tensor:
    """Return the least-squares solution without negative entries."""
    solution, _ = nnls(np.asarray(system.cpu()), np.asarray(target.cpu()))
    return torch.from_numpy(solution).to(system.device)


def _as_labels(counts: Tensor, observation: Observation) -> Tensor:
    """Return labels whose counts add up to the batch, each class as often as `counts` says."""
    counts = counts.clamp_min(0)
    counts = counts * (observation.batch_size / counts.sum().clamp_min(1e-12))
    label_counts = counts.floor()
    for index in (counts - label_counts).argsort(descending=True, stable=True)[
        : observation.batch_size - int(label_counts.sum())
    ]:
        label_counts[index] += 1
    classes = torch.arange(len(label_counts), device=observation.device)
    return torch.repeat_interleave(classes, label_counts.long())


def _last_parameter(observation: Observation) -> tuple[str, int]:
    """Return the last parameter that has a row for each class, and the number of classes."""
    check_classes(observation)
    classes = getattr(getattr(observation.model, "config", None), "num_labels", None)
    parameters = dict(observation.model.named_parameters())
    names = (name for name in reversed(parameters) if len(parameters[name]) == classes)
    last_parameter = next(names, None)
    if last_parameter is None or classes is None:
        raise ValueError(
            f"No parameter of {type(observation.model).__name__} has a row for each class, so "
            "labels cannot be read off its last layer. Pass labels to the Observation."
        )
    return last_parameter, classes


_LABELS = "and cannot be read off the last layer. Pass labels to the Observation."
_UNRECOVERABLE = {
    "several": f"A sample's labels are any number of classes, {_LABELS}",
    "number": f"Labels are numbers, {_LABELS}",
    "token": f"Every token has a label of its own, {_LABELS}",
    "text": "A language model's labels are its text: an attack that needs labels cannot be "
    "used. Take span, embedding_rows or candidates.",
}


def _seeded_generator(observation: Observation) -> torch.Generator:
    return torch.Generator(device=observation.device).manual_seed(0)


def _mean_prediction(observation: Observation) -> Tensor:
    """Return the mean prediction p̄ `(C,)` at random inputs."""
    generator = _seeded_generator(observation)
    total: Tensor | float = 0.0
    with torch.no_grad(), _evaluating(observation.model):
        for _ in range(_DRAWS):
            batch = random_inputs(observation, generator)
            total = total + observation.model(**batch).logits.softmax(-1).mean(0) / _DRAWS
    assert isinstance(total, Tensor)
    return total


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Turn dropout off inside the context, and restore batch statistics afterwards."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with without_dropout(model):
            yield
    finally:
        for buffer, copy in buffers:
            buffer.data.copy_(copy)
