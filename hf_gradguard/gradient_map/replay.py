"""Evaluating one function again and again: the same random draws, the same statistics, plain
attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from .graphs import hooked
from .kept import devices_that_draw


class Replay:
    """What has to hold while a model runs so that it is the same function every time.

    Dropout draws from the global generators, whose state is noted here. Batch normalization in
    training mode writes its statistics. Fused attention kernels have no second derivative.

    Args:
        model: The model, in the mode in which it will run.
        second_order: Whether derivatives of derivatives are wanted.

    Raises:
        NotImplementedError: If they are, and the model has kernels whose own are silently wrong.
    """

    kind: str = ""
    """Of maps that are tried out together: how well differences do on one says it of the others."""

    def __init__(self, model: nn.Module, second_order: bool) -> None:
        self.modules, self.second_order = list(model.modules()), second_order
        if second_order and any(_is_ligers(module) for module in self.modules):
            raise NotImplementedError(
                "Liger kernels compute gradients in the forward pass, so second derivatives are "
                "silently wrong. Make the model without them (use_liger_kernel=False), or the map "
                "with second_order=False, and ask it for nothing that differentiates twice."
            )
        self._devices = devices_that_draw(model)
        self._cpu = torch.get_rng_state()
        self._cuda = [torch.cuda.get_rng_state(device) for device in self._devices]

    @contextmanager
    def draws(self) -> Iterator[None]:
        """The random draws of when this was made; generators and batch statistics stay as they
        were.
        """
        # Copies take the updates: writing a value back would count as an in-place change to what
        # autograd saved.
        statistics = [
            (module, dict(module._buffers))
            for module in self.modules
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.training
        ]
        with torch.random.fork_rng(devices=self._devices):
            torch.set_rng_state(self._cpu)
            for device, state in zip(self._devices, self._cuda, strict=True):
                torch.cuda.set_rng_state(state, device)
            try:
                for module, buffers in statistics:
                    copies = {n: b if b is None else b.clone() for n, b in buffers.items()}
                    module._buffers.update(copies)
                yield
            finally:
                for module, buffers in statistics:
                    module._buffers.update(buffers)

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Attention in plain mathematics, if anything is to be differentiated twice."""
        if not self.second_order:
            yield
            return
        configs = {id(m.config): m.config for m in self.modules if isinstance(m, PreTrainedModel)}
        plain = (None, "eager", "sdpa")
        fused = [
            config
            for config in configs.values()
            if getattr(config, "_attn_implementation", None) not in plain
        ]
        settings = [config._attn_implementation for config in fused]
        try:
            for config in fused:
                config._attn_implementation_internal = "eager"
            with sdpa_kernel(SDPBackend.MATH):
                yield
        finally:
            for config, setting in zip(fused, settings, strict=True):
                config._attn_implementation_internal = setting

    @contextmanager
    def run(self) -> Iterator[None]:
        """Both, with gradients on: for a forward pass whose result is differentiated."""
        with torch.enable_grad(), self.draws(), self.kernels():
            yield

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        """No autocast inside the model: differences of two passes would drown in its rounding."""
        kinds = [kind for kind in ("cpu", "cuda") if self._on(kind)]
        before = {kind: torch.is_autocast_enabled(kind) for kind in kinds}

        def leave_autocast(_module: nn.Module, _args: object) -> None:
            for kind in kinds:  # a model that entered it restores what was before
                if torch.is_autocast_enabled(kind):
                    torch.set_autocast_enabled(kind, False)

        try:
            with hooked(m.register_forward_pre_hook(leave_autocast) for m in self.modules):
                yield
        finally:
            for kind, enabled in before.items():
                torch.set_autocast_enabled(kind, enabled)

    def _on(self, kind: str) -> bool:
        return kind == "cuda" if self._devices else kind == "cpu"

    def recomputes(self) -> bool:
        """Whether layers run again in the backward pass, under activation checkpointing."""
        return any(getattr(m, "gradient_checkpointing", False) and m.training for m in self.modules)


def _is_ligers(module: nn.Module) -> bool:
    """Whether a module is one of Liger's, or runs a function of Liger's in its own's place."""
    sources = (type(module), getattr(module.forward, "__func__", module.forward))
    return any(str(getattr(s, "__module__", "")).startswith("liger_kernel") for s in sources)
