"""Protection of what a client sends after a round of local training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..defenses import Defense, Message, make_defense
from ..gradient_map import Batch, LossFunction, UpdateMap
from ..gradient_map.local_training.optimizers import Optimizer
from ..randomness import Stream


def protect_update(
    model: nn.Module,
    batches: Sequence[Batch],
    defense: str | Defense,
    *,
    learning_rate: float | Sequence[float],
    optimizer: str | Optimizer = "sgd",
    optimizer_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
    share_input_embeddings: bool = False,
    withhold: Sequence[str] = (),
    generator: Stream | None = None,
) -> Message:
    """Train locally for K steps, and return the protected update Δθ = θ_K - θ_0.

    The model is not changed. A defense belongs to one client: give the same object in every round,
    and keep its `state_dict()` in between. It may have to know the model and its tokenizer: call
    `defense.prepare(model, tokenizer)` first.

    **The unit of all settings is the update's**, that is the weights': `scale=1e-4` adds noise of
    that standard deviation to Δθ. `relative_scale` is a multiple of the update's own size.

    Args:
        model: The model, in the mode in which the client trains it.
        batches: The batches of the K steps, in order; see `UpdateMap`.
        defense: The defense's name, with its default settings, or one made by `make_defense`.
        learning_rate: η, or one of each step.
        optimizer: The optimizer, as for `UpdateMap`.
        optimizer_kwargs: Its settings, as for `UpdateMap`.
        loss_fn: The loss, as for `GradientMap`.
        share_input_embeddings: Whether to share tables, as for `GradientMap`.
        withhold: Patterns of withheld names, as for `GradientMap`.
        generator: The source of randomness, as for `Defense.__call__`.

    Returns:
        One tensor a shared parameter. Parameters that are withheld are not trained, and not in it.

    Raises:
        ValueError: If `UpdateMap` or the defense refuses the settings.
        FloatingPointError: If training diverged.

    Example:
        >>> sent = protect_update(model, [batch] * 4, make_defense("none"), learning_rate=0.1)
        >>> sent.exact, sent.keys() == GradientMap(model, batch).gradient().keys()
        (True, True)
    """
    if isinstance(defense, str):
        defense = make_defense(defense)
    gmap = UpdateMap(
        model,
        batches,
        learning_rate=learning_rate,
        optimizer=optimizer,
        optimizer_kwargs=optimizer_kwargs,
        loss_fn=loss_fn,
        share_input_embeddings=share_input_embeddings,
        withhold=withhold,
        second_order=defense.facts.needs_second_order,
        needs_input=defense.facts.needs_input,
    )
    return defense(gmap, generator)
