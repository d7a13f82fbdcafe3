"""Evaluation networks: how much of an input is noise, as one number in [0, 1] per sample.

They are the privacy metric D of the Refiner defense, which raises it by gradient ascent on the
input. So they are differentiable twice on every device (no fused attention), and the same in train
and eval mode (no dropout, no batch statistics).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput


@dataclass
class EvaluationNetworkOutput(ModelOutput):
    """What `forward` returns.

    Args:
        loss: Binary cross-entropy with the true ratios, if they were given.
        noise_ratio: `(B,)` in [0, 1]: 0 natural, 1 nothing but noise.
    """

    loss: Tensor | None = None
    noise_ratio: Tensor | None = None


class EvaluationNetworkBase(PreTrainedModel):
    """What both kinds share: initial weights by PyTorch's own rules, and where they are from.

    Attributes:
        revision: The Hub's commit, if it was loaded from there.
        sha256: Of the file that the weights were loaded from.
    """

    revision: str | None = None
    sha256: str | None = None

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
            init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm) and module.elementwise_affine:
            init.ones_(module.weight)
            init.zeros_(module.bias)
