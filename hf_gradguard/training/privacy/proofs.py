"""Statements about a training: whether its defense proves something, and whether noise is known.

Whoever knows a `noise_seed` draws the same noise, takes it off again and has the clipped gradient;
the same seed draws the rows of a batch, and the labels of randomized response. So neither log nor
card nor file states an ε or a noise multiplier of such a run. The account goes on counting.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import TrainingArguments
from transformers.utils import logging

from ...defenses import Chain, Defense
from ...defenses.dp import DPSGD, OptimalDPSGD
from ...gradient_map.domain import declared_domain
from ..config import setting

logger = logging.get_logger(__name__)


def is_proved(defense: Defense) -> bool:
    """Return whether a defense proves something of whole trainings.

    It does so for rows, or for what is clipped as a whole.

    Example:
        >>> is_proved(make_defense("dp_sgd", per_sample=True, noise_multiplier=1.0))
        True
    """
    links = chained_defenses(defense)
    return any(getattr(link, n, False) for link in links for n in ("per_sample", "correlated"))


def chained_defenses(defense: Defense) -> Iterator[Defense]:
    """Yield the defenses of a chain, or the one that is given."""
    if isinstance(defense, Chain):
        yield from chained_defenses(defense.first)
        yield from chained_defenses(defense.second)
    else:
        yield defense


def log_protection(defense: Defense, model: nn.Module) -> None:
    """Log what was recovered behind each defense of a chain, a line each and once a process.

    It also logs what `dp_sgd` without `per_sample` protects, where its name promises more.

    Args:
        defense: The defense.
        model: The model that is trained. A line is of texts or of images alone where the model
            says which it takes.

    Example:
        >>> log_protection(make_defense("dp_sgd", scale=0.1), model)
    """
    from ...defenses.measured import recovered_behind

    kind = declared_domain(model)
    for link in chained_defenses(defense):
        if is_client_level(link):
            logger.warning_once(CLIENT_LEVEL.format(link.name))
        if link.name != "none" and (recovered := recovered_behind(link, kind)):
            more = "" if is_proved(link) else " Stronger attacks find more."
            logger.warning_once(f"Behind {link.name}: {recovered}.{more}")


def is_client_level(defense: Defense) -> bool:
    """Return whether a defense of DP's name clips a client's gradient as a whole.

    Example:
        >>> is_client_level(make_defense("dp_sgd", scale=0.1))
        True
    """
    if isinstance(defense, DPSGD):
        return not (defense.per_sample or defense.correlated)
    return isinstance(defense, OptimalDPSGD)


def has_known_seed(args: TrainingArguments) -> bool:
    """Return whether a training's noise follows a seed.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> has_known_seed(GradGuardConfig("out", noise_seed=0))
        True
    """
    return setting(args, "noise_seed") is not None


def is_noise_known(trainer: Any) -> bool:
    """Return whether noise of any message follows a seed.

    It may be of this training, of an earlier one of the same Trainer, or of the run that was
    resumed.

    Example:
        >>> from hf_gradguard import GradGuardTrainer
        >>> is_noise_known(GradGuardTrainer(model, defense="pruning"))
        False
    """
    messages = trainer.shared_messages
    return has_known_seed(trainer.args) or bool(messages.total and messages.by("noise")[FIXED_SEED])


CLIENT_LEVEL = (
    "{} is client-level noise: it clips a client's batch gradient as a whole, so no (ε, δ) of a "
    "row follows, and none is stated. For one row of the data take dp_sgd with per_sample=True."
)
NO_EPSILON = (
    "No ε is stated: the noise was drawn from a fixed seed (noise_seed), and whoever knows the "
    "seed takes it off again. Leave noise_seed out."
)
FIXED_SEED = (
    "**The noise was drawn from a fixed seed, so it hides nothing from whoever knows the seed.**"
)
