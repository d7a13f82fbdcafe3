"""Local training in an audit: clients that send the change of their weights, and what a server
makes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..attacks.local import LocalTraining
from ..attacks.observation import Observation
from ..gradient_map.local_training.update import mean_gradient
from .settings import AuditSettings

_BOUNDS = ("clip_norm", "clip_coordinate")  # settings of attacks in the message's unit


def training_of(terms: AuditSettings) -> LocalTraining | None:
    """How clients train before they send; `None` if they send gradients. The attacker knows it, and
    in which order the batches come.

    Raises:
        ValueError: If the learning rate is no number above 0, or the optimizer is unknown.

    Example:
        >>> training_of(AuditSettings(local_steps=4, learning_rate=0.1)).rates
        (0.1, 0.1, 0.1, 0.1)
        >>> training_of(AuditSettings()) is None
        True
    """
    if not terms.local_steps:
        return None
    # Weight decay is known and takes nothing from the message: transformers' default is none.
    settings = {"weight_decay": 0.0}
    rate = float(terms.learning_rate or 0.0)
    return LocalTraining.of(rate, terms.local_steps, terms.batch_size, terms.optimizer, settings)


def observation(
    local: LocalTraining | None, model: nn.Module, message: Mapping[str, Tensor], **grants: Any
) -> Observation:
    """What a server sees of a message: a gradient, or an update and how it was trained.

    Args:
        local: The client's training, if it is an update.
        model: As it was sent to the client.
        message: What came back.
        **grants: As for `Observation`; noise and law are those of the message.

    Example:
        >>> seen = observation(None, model, shared, input_shape=(2, 8))
        >>> seen.local is None, seen.gradient.keys() == shared.keys()
        (True, True)
    """
    if local is None:
        return Observation(model=model, gradient=message, **grants)
    weights = {name: p.detach() for name, p in model.named_parameters() if name in message}
    gradient = mean_gradient(local.optimizer, local.rates, weights, dict(message))
    return Observation(model=model, gradient=gradient, local=local, **local.behind(grants))


def in_unit_of_gradients(
    local: LocalTraining | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings of attacks that a defense names in its message's unit, in that of the observation's
    gradient.

    Example:
        >>> local = training_of(AuditSettings(local_steps=2, learning_rate=0.5))
        >>> in_unit_of_gradients(local, {"clip_norm": 3.0, "complete": True})
        {'clip_norm': 3.0, 'complete': True}
    """
    if local is None:
        return dict(settings)
    total = local.optimizer.linear(list(local.rates))[1]
    return {
        name: value / total if name in _BOUNDS and value is not None else value
        for name, value in settings.items()
    }
