"""Labels, read off the gradient of the last layer.

For cross-entropy over C classes the bias gradient of the last layer is mean_b (p_b - y_b): softmax
probabilities minus the one-hot label. With one sample its only negative entry is the label (Zhao,
Mopuri and Bilen, "iDLG", 2020). With several, B (p̄ - gradient) estimates how often each class
occurs, with p̄ the mean prediction at inputs of the attacker's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..gradient_map.domain import IMAGE
from .observation import Observation, without_dropout


def recover_labels(seen: Observation) -> Tensor:
    """`(B,)` class ids: exact for one sample whose last layer is undefended, an estimate in
    ascending order for several.

    Raises:
        ValueError: If the model's last layer gives no class scores, or its gradient was not shared.

    Example:
        >>> from dataclasses import replace
        >>> recover_labels(replace(image_seen, labels=None)).shape
        torch.Size([2])
    """
    slope = last_layer_slope(seen)
    if seen.batch_size == 1:
        return slope.argmin()[None]
    counts = seen.batch_size * (_mean_prediction(seen) - slope)
    counts = counts.clamp_min(0) * (seen.batch_size / counts.clamp_min(0).sum().clamp_min(1e-12))
    whole = counts.floor()
    for index in (counts - whole).argsort(descending=True, stable=True)[
        : seen.batch_size - int(whole.sum())
    ]:
        whole[index] += 1
    return torch.repeat_interleave(torch.arange(len(whole), device=seen.device), whole.long())


def last_layer_slope(seen: Observation) -> Tensor:
    """`(C,)`: mean_b (p_b - y_b), read off the last layer's bias; up to a positive factor if it has
    none.

    Without a bias, row c of the weight's gradient is (p - y)_c h with the features h of the one
    sample. The label's entry is minus the sum of the others, so its row is the longest, and it
    points away from them.

    Example:
        >>> slope = last_layer_slope(seen)  # softmax minus one-hot sums to zero
        >>> slope.shape, bool(slope.sum().abs() < 1e-5)
        (torch.Size([2]), True)
    """
    classes = getattr(getattr(seen.model, "config", None), "num_labels", None)
    parameters = dict(seen.model.named_parameters())
    last = next((name for name in reversed(parameters) if len(parameters[name]) == classes), None)
    if last is None:
        raise ValueError(
            f"No parameter of {type(seen.model).__name__} has a row for each class, so labels "
            "cannot be read off its last layer. Pass labels to the Observation."
        )
    if last not in seen.gradient:
        raise ValueError(
            f"The gradient of the last layer ({last}) was not shared. Pass labels to the "
            "Observation."
        )
    slope = seen.gradient[last]
    if slope.dim() == 1:
        return slope
    if seen.batch_size > 1 or classes == 2:
        raise ValueError(
            f"The last layer ({last}) has no bias. Its weight's gradient gives away the label of "
            "one sample among more than two classes only. Pass labels to the Observation."
        )
    rows = slope.flatten(1)
    return -(rows @ rows[rows.norm(dim=1).argmax()])


def _mean_prediction(seen: Observation, draws: int = 8) -> Tensor:
    """p̄ `(C,)` at random inputs."""
    generator = torch.Generator(device=seen.device).manual_seed(0)
    total: Tensor | float = 0.0
    with torch.no_grad(), without_dropout(seen.model):
        for _ in range(draws):
            batch = _RANDOM[seen.domain.name](seen, generator)
            total = total + seen.model(**batch).logits.softmax(-1).mean(0) / draws
    assert isinstance(total, Tensor)
    return total


def _random_ids(seen: Observation, generator: torch.Generator) -> dict[str, Tensor]:
    batch = seen.placeholder()
    size = seen.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    drawn = torch.randint(size, seen.input_shape, generator=generator, device=seen.device)
    return {**batch, "input_ids": torch.where(seen.known_ids() >= 0, batch["input_ids"], drawn)}


def _random_pixels(seen: Observation, generator: torch.Generator) -> dict[str, Tensor]:
    like = IMAGE.main_input(seen.placeholder())
    drawn = torch.rand(like.shape, generator=generator, device=like.device, dtype=like.dtype)
    return {IMAGE.key: drawn}


_RANDOM = {"text": _random_ids, "image": _random_pixels}
