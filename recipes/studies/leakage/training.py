"""LeNet as the parts of this study train it, and what networks make of images."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import set_seed
from transformers.utils import logging

from recipes.small_networks import LeakageLeNetForImageClassification

from ..lib.images import lenet_for


def stages(
    x: Tensor, labels: Tensor, steps: Sequence[int]
) -> dict[int, LeakageLeNetForImageClassification]:
    """The model after so many steps of Adam on 64 images each, at a rate that falls from 3e-3 to 0
    at the last one.

    Args:
        x: `(N, C, H, W)` in uint8.
        labels: `(N,)`.
        steps: After which it is kept, in rising order.
    """
    set_seed(0)
    model, last, kept = lenet_for({"pixel_values": x}).train(), steps[-1], {}
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / max(last, 1))
    for step in logging.tqdm(range(last + 1), desc="training"):
        if step in steps:
            kept[step] = copy.deepcopy(model).eval()
        if step < last:
            batch = torch.randint(len(x), (64,))
            optimizer.zero_grad()
            model(pixel_values=x[batch].float() / 255, labels=labels[batch]).loss.backward()
            optimizer.step()
            decay.step()
    return kept


@torch.no_grad()
def logits_of(model: nn.Module, pixels: Tensor) -> Tensor:
    """`(N, classes)`, of images in [0, 1]."""
    return torch.cat([model(pixel_values=part).logits for part in pixels.split(1000)])


def accuracy(model: nn.Module, pixels: Tensor, labels: Tensor) -> float:
    """Of images in [0, 1]."""
    return float((logits_of(model, pixels).argmax(1) == labels).double().mean())
