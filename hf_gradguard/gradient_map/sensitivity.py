"""Estimates of how strongly each parameter's gradient depends on the input."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..randomness import Stream, normal

if TYPE_CHECKING:
    from .map import GradientMap, Tensors


def estimate_squares(
    gmap: GradientMap, num_probes: int, generator: Stream | torch.Generator | None, probe_chunk: int
) -> Tensors:
    """s_i² from random probes; see `GradientMap.squared_sensitivity`."""
    if num_probes < 1 or probe_chunk < 1:
        raise ValueError(
            f"num_probes and probe_chunk must be at least 1, but are {num_probes} and "
            f"{probe_chunk}."
        )
    x = gmap.input
    generator = generator or Stream()
    total = {
        name: torch.zeros(
            p.shape, device=p.device, dtype=torch.promote_types(p.dtype, torch.float32)
        )
        for name, p in gmap.parameters.items()
    }
    dtype = next(iter(total.values())).dtype
    for start in range(0, num_probes, probe_chunk):
        shape = (min(probe_chunk, num_probes - start), *x.shape)
        probes = normal(generator, shape, x.device, dtype)
        # Checkpointed layers run again in the backward pass, and vmap refuses their dropout: one
        # probe at a time.
        for chunk in probes.split(1 if gmap.replay.recomputes() else len(probes)):
            products = zip(total.values(), gmap.jvps(chunk.to(x.dtype)), strict=True)
            for squares, several in products:
                for product in several:
                    squares.addcmul_(product, product, value=1 / num_probes)
            del products, several, product  # before the next chunk's are there
    return total
