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

    The model is not changed. A defense object belongs to one client: pass the same object in every
    round, and keep its `state_dict()` in between. Some defenses must know the model and its
    tokenizer: call `defense.prepare(model, tokenizer)` first.

    **The unit of all settings is the update's**, that is the weights': `scale=1e-4` adds noise of
    that standard deviation to Δθ. `relative_scale` is a multiple of the update's own size.

    Args:
        model: The model, in the mode in which the client trains it.
        batches: The batches of the K steps, in order; see `UpdateMap`.
        defense: The defense's name, with its default settings, or one made by `make_defense`.
        learning_rate: The learning rate η, one for all steps or one for each.
        optimizer: `"sgd"` or `"adamw"`, with a new state, or an optimizer that `make_optimizer`
            made.
        optimizer_kwargs: The other settings of a named optimizer, as `torch.optim` calls them.
        loss_fn: The function `(model, batch) -> scalar` that returns the batch-mean loss. By
            default it is the loss that the model returns.
        share_input_embeddings: Whether to share the tables that the input indexes, whose rows say
            which words were there.
        withhold: Patterns of the names of parameters that are neither trained nor shared.
        generator: The source of randomness. By default it has a new key from the operating system.

    Returns:
        The update, with one tensor for each shared parameter.

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
