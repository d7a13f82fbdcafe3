"""Finds out whether a model computes with fewer digits than float32.

Half precision rounds every number to 8 or 11 bits. What a row adds to a gradient then follows from
how many rows stand beside it: kernels and the padding are chosen by the size of a batch, and a
change in the last bit of float32 is rounded up to one of 2⁻⁹. Rows that are alike move together, so
that one row more can move the sum of a thousand by several clipping bounds. No clipping of rows
bounds that. So rows are differentiated one by one there, each in a pass that no other row has a
part in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..layers import is_coarse
from ..map import GradientMap
from ..replay import differentiate


class _Operations(TorchDispatchMode):
    """Notes what runs inside: the first operation that gives back numbers of half precision or
    less, and whether anything is convolved.
    """

    coarse = ""
    convolves = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        self.convolves |= "conv" in name or "rnn" in name
        if not self.coarse and any(map(is_coarse, tree_leaves(outputs))):
            self.coarse = name
        return outputs


def coarse_arithmetic(gmap: GradientMap) -> str:
    """Says why a map's gradient is not computed in float32 or better; nothing if it is.

    All operations of one pass and of its gradient are looked at, and torch's settings for products
    of float32.

    Example:
        >>> coarse_arithmetic(gmap)
        ''
    """
    if any(map(is_coarse, gmap.parameters.values())):
        return "its weights are in half precision"
    operations = _Operations()
    with gmap.replay.run(), operations:
        differentiate(gmap.loss_fn(gmap.model, dict(gmap.batch)), gmap.parameters)
    if operations.coarse:
        return f"it computes in half precision ({operations.coarse}), as under autocast"
    is_cuda = next(iter(gmap.parameters.values())).is_cuda
    return _coarse_products("cuda" if is_cuda else "cpu", operations.convolves)


def _coarse_products(device: str, convolves: bool) -> str:
    """Says what torch is allowed to do to float32 numbers before it multiplies them."""
    products, convolutions = _PRODUCTS[device]
    for name in products + convolutions * convolves:
        backend, _, operation = name.partition(".")
        settings: Any = getattr(getattr(torch.backends, backend), operation, None)
        if not hasattr(settings, "fp32_precision"):  # torch before 2.9 has one setting for all
            return _of_older_torch(device, convolves)
        if settings.fp32_precision not in ("none", "ieee"):
            return f"torch.backends.{name}.fp32_precision rounds what it multiplies"
    return ""


def _of_older_torch(device: str, convolves: bool) -> str:
    if torch.get_float32_matmul_precision() != "highest":
        return "torch.set_float32_matmul_precision rounds what it multiplies"
    if device == "cuda" and convolves and torch.backends.cudnn.allow_tf32:
        return "torch.backends.cudnn.allow_tf32 rounds what it multiplies"
    return ""


_PRODUCTS = {
    "cpu": (["mkldnn.matmul"], ["mkldnn.conv", "mkldnn.rnn"]),
    "cuda": (["cuda.matmul"], ["cudnn.conv", "cudnn.rnn"]),
}
"""Where torch says how float32 numbers are multiplied: always, and in convolutions."""
