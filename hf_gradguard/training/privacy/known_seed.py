"""Whether somebody may know the noise: then nothing is proved, and no figure says that it is.

Whoever knows a `noise_seed` draws the same noise, takes it off again and has the clipped gradient;
the same seed draws the rows of a batch, and the labels of randomized response. So neither log nor
card nor file states an ε or a noise multiplier of such a run. The account goes on counting.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments

from ..config import setting

NO_EPSILON = (
    "No ε is stated: the noise was drawn from a fixed seed (noise_seed), and whoever knows the "
    "seed takes it off again. Leave noise_seed out."
)
FIXED_SEED = (
    "**The noise was drawn from a fixed seed, so it hides nothing from whoever knows the seed.**"
)


def has_known_seed(args: TrainingArguments) -> bool:
    """Whether a training's noise follows a seed.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> has_known_seed(GradGuardConfig("out", noise_seed=0))
        True
    """
    return setting(args, "noise_seed") is not None


def is_noise_known(trainer: Any) -> bool:
    """Whether noise of any message follows a seed: of this training, of an earlier one of the same
    Trainer, or of the run that was resumed.

    Example:
        >>> from hf_gradguard import GradGuardTrainer
        >>> is_noise_known(GradGuardTrainer(model, defense="pruning"))
        False
    """
    messages = trainer.shared_messages
    return has_known_seed(trainer.args) or bool(messages.total and messages.by("noise")[FIXED_SEED])
