"""Settings of `gradguard recommend`; this module imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..audit.settings import AttackedSettings
from ..flags import option

_FED_BACK = "optimal_pruning:ratio={},error_feedback=true"
DEFAULT_DEFENSES = {
    "text": "gaussian_noise:relative_scale=20,optimal_noise:relative_scale=20,"
    f"gradient_sketch:samples=16,{_FED_BACK.format(0.97)},"
    "gaussian_noise:relative_scale=5,gaussian_noise:relative_scale=50",
    "image": f"{_FED_BACK.format(0.95)},{_FED_BACK.format(0.99)},"
    "gaussian_noise:relative_scale=5,gaussian_noise:relative_scale=20,gradient_sketch,"
    "gaussian_noise:relative_scale=1",
}
"""The default defenses by a domain's name, as for `gradguard audit`, in order of preference among
equals.
"""
DEFAULT_ATTACKS = {"text": "span", "image": "inverting_gradients:steps=10"}
FALLBACK_ATTACKS = {
    "text": "tag:steps=300,seconds=4",  # 300 steps alone took 100 seconds a sentence of MiniLM
    "image": "",
}
"""Attacks that are added if the defaults reconstruct little of the undefended gradient."""
WARMUP = 0.1  # of a training's steps, the recommended one's too


@dataclass(kw_only=True)
class TrialSettings:
    """The settings of the trials, equal for all defenses.

    Args:
        steps: Optimizer steps of a training.
        batch_size: Samples in a message of training.
        message_size: Samples in a message that is attacked.
        attacked: Samples that are attacked, of four messages at least; half of them only behind
            finalists. They are never trained on.
        decoys: Further samples, which nothing is trained on: candidates for membership inference,
            beside those that are attacked. 0 leaves it out.
        learning_rate: The rate that undefended rates are tried around. Rates behind noise as large
            as the gradient are tried around twice it, and further ones where the best is at an end.
        budget: The accuracy that may be lost, as a fraction.
        seeds: The most trainings of each finalist, beside the one that chose its learning rate.
        budget_minutes: The most minutes to take. Defenses that do not fit are left out, and named;
            seeds and learning rates become fewer.
        max_length: The most tokens of a text; longer ones are cut.
        seed: The seed of the split, the trainings and the attacks.
        heads: Whether to try linear heads by proof.

    Raises:
        ValueError: If a value is out of range.
    """

    _argument_group_name: ClassVar[str] = "trainings and messages"

    steps: int = option(100, "optimizer steps of a training")
    batch_size: int = option(16, "samples in a message of training")
    message_size: int = option(1, "samples in a message that is attacked")
    attacked: int = option(16, "samples that are attacked")
    decoys: int = option(
        50, "further samples as candidates for membership inference; 0 leaves it out"
    )
    learning_rate: float = option(2e-4, "learning rate that undefended rates are tried around")
    budget: float = option(0.03, "accuracy that may be lost, as a fraction")
    seeds: int = option(3, "most trainings of each finalist, beside the one that chose its rate")
    budget_minutes: float = option(15.0, "minutes to take at most; what does not fit is left out")
    max_length: int = option(64, "most tokens of a text; longer ones are cut")
    seed: int = option(0, "seed of the split, the trainings and the attacks")
    heads: bool = option(True, "try linear heads by proof")

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch_size",
            "message_size",
            "attacked",
            "seeds",
            "max_length",
            "decoys",
        ):
            minimum = 0 if name == "decoys" else 1
            if getattr(self, name) < minimum:
                raise ValueError(
                    f"{name} must be at least {minimum}, but is {getattr(self, name)}."
                )
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be above 0, but is {self.learning_rate}.")
        if not 0 <= self.budget < 1:
            raise ValueError(f"budget must be from 0 to below 1, but is {self.budget}.")
        if self.attacked % (2 * self.message_size):
            raise ValueError(
                f"attacked={self.attacked} samples do not fill two halves of messages of "
                f"{self.message_size}: take a multiple of {2 * self.message_size}."
            )
        if self.attacked < 4 * self.message_size:
            raise ValueError(
                f"attacked={self.attacked} leaves one message in a half, which has no interval: "
                f"attack {4 * self.message_size} or more."
            )
        if not self.budget_minutes > 0:
            raise ValueError(f"budget_minutes must be above 0, but is {self.budget_minutes}.")


@dataclass(kw_only=True)
class CommandSettings(AttackedSettings, TrialSettings):
    """The settings of the command beside those of the trials."""

    _argument_group_name: ClassVar[str] = "encoders, defenses and attacks"

    encoder: list[str] | None = option(  # noqa: RUF009
        None, "further encoders for heads by proof, beside the model's own: folders or Hub names"
    )
    public: str | None = option(
        None, "file of texts, or folder of images, that are nobody's secret, for heads by proof. "
        "Default for texts: sentences that come with the package",
    )  # fmt: skip
    rows: int = option(6000, "rows of the data to use at most, drawn at random")
    defense: Any = option(None, "as for `gradguard audit`. Default: noise and pruning")  # noqa: RUF009
    attack: Any = option(None, "as for `gradguard audit`. Default: the strongest that are quick")  # noqa: RUF009

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows <= self.attacked:
            raise ValueError(
                f"rows must be more than the {self.attacked} that are attacked, but is {self.rows}."
            )
