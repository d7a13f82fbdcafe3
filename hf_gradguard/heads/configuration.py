"""The configuration of a private head, as the Hub keeps it."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from ..models import PRIVATE_HEAD

CONSTANT = 0.3  # chosen on held-out sentences of SST-2


@strict
class PrivateHeadConfig(PreTrainedConfig):
    """The configuration of a linear head on a frozen encoder's features.

    Args:
        task: The task's name on the Hub.
        encoder: The encoder's name on the Hub; of a folder, its last part.
        encoder_revision: The commit of the Hub that the encoder was loaded from.
        encoder_config: The encoder's own configuration.
        save_encoder: Whether `save_pretrained` writes the encoder's weights, too. Otherwise
            `from_pretrained` loads it from `encoder`.
        pairs: Whether a sample is a pair of texts.
        sep_token_id: The token between the texts of a pair.
        num_features: The number of features that the encoder gives for a sample or a token.
        directions: The number of public directions onto which features are cut.
        constant: The feature in a bias's place. All features together have norm 1.
        max_length: The most tokens of a text.
        label_center: The number in the middle of a regression's labels.
        label_scale: How far they are from it at most.
        public_data: What the directions were found by, for the model's card.

    Example:
        >>> config = PrivateHeadConfig(encoder="organization/model", directions=300, num_labels=3)
        >>> config.directions, config.num_labels
        (300, 3)
    """

    model_type = PRIVATE_HEAD

    task: str = "text-classification"
    encoder: str = ""
    encoder_revision: str | None = None
    encoder_config: dict[str, Any] | None = None
    save_encoder: bool = True
    pairs: bool = False
    sep_token_id: int | None = None
    num_features: int = 1
    directions: int = 1400
    constant: float = CONSTANT
    max_length: int = 128
    label_center: float = 0.0
    label_scale: float = 1.0
    public_data: str = ""

    def __post_init__(self, **kwargs: Any) -> None:
        if min(self.directions, self.num_features, self.max_length) < 1:
            raise ValueError(
                "directions, num_features and max_length must be at least 1, but are "
                f"{self.directions}, {self.num_features} and {self.max_length}."
            )
        if not 0 <= self.constant < 1 or not self.label_scale > 0:
            raise ValueError(
                "constant must be at least 0 and below 1, and label_scale above 0, but they are "
                f"{self.constant} and {self.label_scale}."
            )
        super().__post_init__(**kwargs)
