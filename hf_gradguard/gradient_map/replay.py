"""Evaluating one function again and again: the same random draws, the same statistics, plain
attention.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel


class DrawState(NamedTuple):
    """The state of the generators of torch (on the processor), numpy and `random`.

    Example:
        >>> before = DrawState.now()
        >>> _ = torch.rand(1)
        >>> before.is_now()
        False
        >>> before.restore()
        >>> before.is_now()
        True
    """

    of_torch: torch.Tensor
    of_numpy: Any
    of_python: Any

    @classmethod
    def now(cls) -> DrawState:
        """As it is."""
        return cls(torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate())

    def restore(self) -> None:
        """Let all three draw from here on."""
        torch.set_rng_state(self.of_torch)
        np.random.set_state(self.of_numpy)
        random.setstate(self.of_python)

    def is_now(self) -> bool:
        """Whether nothing was drawn since."""
        return self.plain() == DrawState.now().plain()

    def plain(self) -> tuple[Any, ...]:
        """What is equal where the state is."""
        return self.of_torch.numpy().tobytes(), pickle.dumps(self.of_numpy), self.of_python


@contextmanager
def draws_restored() -> Iterator[DrawState]:
    """Whatever is drawn in here, afterwards the three generators are as they were.

    Example:
        >>> before = DrawState.now()
        >>> with draws_restored():
        ...     _ = random.random(), np.random.rand(), torch.rand(1)
        >>> before.is_now()
        True
    """
    state = DrawState.now()
    try:
        yield state
    finally:
        state.restore()


def seed_all(seed: int) -> None:
    """Seed all three, inside `draws_restored`.

    Example:
        >>> with draws_restored():
        ...     seed_all(3)
        ...     torch.initial_seed()
        3
    """
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


class Replay:
    """What has to hold while a model runs so that it is the same function every time.

    Dropout draws from torch's global generators, losses (mixup) and masks (SpecAugment) also from
    those of numpy and `random`: their state is noted here. Batch normalization in training mode
    writes its statistics. Fused attention kernels have no second derivative.

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
        self._state = DrawState.now()
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
        with draws_restored(), torch.random.fork_rng(devices=self._devices):
            self._state.restore()
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

    def kernels(self) -> AbstractContextManager[None]:
        """Attention in plain mathematics, if anything is to be differentiated twice."""
        return self._plain_attention() if self.second_order else nullcontext()

    @contextmanager
    def _plain_attention(self) -> Iterator[None]:
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
        was_enabled = {kind: torch.is_autocast_enabled(kind) for kind in kinds}

        def leave_autocast(_module: nn.Module, _args: object) -> None:
            for kind in kinds:  # a model that entered it restores what was before
                if torch.is_autocast_enabled(kind):
                    torch.set_autocast_enabled(kind, False)

        try:
            with hooked(m.register_forward_pre_hook(leave_autocast) for m in self.modules):
                yield
        finally:
            for kind, enabled in was_enabled.items():
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


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[list[nn.Module]]:
    """All modules of a model, whose modes are put back, whatever happens to them meanwhile.

    Example:
        >>> model = model.train()
        >>> with modes_kept(model):
        ...     _ = model.eval()
        >>> model.training
        True
    """
    modes = {module: module.training for module in model.modules()}
    try:
        yield list(modes)
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def draws_kept(model: nn.Module) -> Iterator[None]:
    """The generators of torch, on the processor and on the model's GPUs, of numpy and of `random`,
    put back as they were.

    Example:
        >>> before = torch.get_rng_state()
        >>> with draws_kept(model):
        ...     _ = torch.rand(1)
        >>> torch.equal(before, torch.get_rng_state())
        True
    """
    with draws_restored(), torch.random.fork_rng(devices=devices_that_draw(model)):
        yield


def seed_draws(model: nn.Module, seed: int) -> None:
    """Seeds what `draws_kept` puts back. `torch.manual_seed` takes a millisecond where it is deep
    in calls: it notes a traceback for every kind of device that is not in use.

    Example:
        >>> seed_draws(model, 7)
        >>> torch.initial_seed()
        7
    """
    torch.default_generator.manual_seed(seed)
    for index in devices_that_draw(model):
        torch.cuda.default_generators[index].manual_seed(seed)


def devices_that_draw(model: nn.Module) -> list[int]:
    """The GPUs that a model is on.

    Example:
        >>> devices_that_draw(torch.nn.Linear(2, 1))
        []
    """
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})


class RunWithin(nn.Module):
    """A module whose forward pass is a function that runs `model`: what `functional_call` needs to
    swap its parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        return run()


def differentiate(
    loss: Tensor,
    leaves: Mapping[str, Tensor],
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
) -> dict[str, Tensor]:
    """The derivatives of a loss by leaves, zeros by those that it does not use.

    Raises:
        ValueError: If it uses none of them.
        RuntimeError: With `create_graph`, if they come through a kernel that is not to be
            differentiated twice.
    """
    graph: Any = {"retain_graph": retain_graph or create_graph, "create_graph": create_graph}
    gradients = torch.autograd.grad(loss, list(leaves.values()), **graph, allow_unused=True)
    if all(gradient is None for gradient in gradients):
        raise ValueError(
            "The loss is not computed from any shared parameter, so there is no gradient of it. "
            "Losses that differentiate by themselves and keep what they found (sentence-"
            "transformers' Cached...Loss) are such: take the plain one, with smaller batches."
        )
    if create_graph:
        check_whole(gradient for gradient in gradients if gradient is not None)
    pairs = zip(leaves.items(), gradients, strict=True)
    return {n: torch.zeros_like(p.detach()) if g is None else g for (n, p), g in pairs}


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Take hooks away again on the way out.

    Example:
        >>> with hooked([model.register_forward_hook(print)]):
        ...     len(model._forward_hooks)
        1
        >>> len(model._forward_hooks)
        0
    """
    registered = list(handles)
    try:
        yield
    finally:
        for handle in registered:
            handle.remove()


def nodes_of(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """Every step of autograd's that tensors were computed by."""
    nodes, visited = [tensor.grad_fn for tensor in tensors], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        yield node
        nodes += [next_node for next_node, _ in node.next_functions]


def check_whole(derivatives: Iterable[Tensor]) -> None:
    """Raise if derivatives come through a kernel that is not to be differentiated twice: autograd
    does so itself only where its path leads on, and leaves it out where it ends.
    """
    if any(node.name() == "torch::autograd::Error" for node in nodes_of(derivatives)):
        raise RuntimeError(
            "The model has a function that is marked once_differentiable, as fused kernels are: "
            "without it second derivatives would be wrong. Run the model without that kernel, or "
            "ask for nothing that differentiates twice (method='difference', second_order=False)."
        )


@contextmanager
def no_exchange(model: nn.Module) -> Iterator[None]:
    """Refuse what a model's own code sends to other ranks in here, as losses of detection send how
    many objects a batch has. The ranks that share a sharded model may exchange.

    Refused are collectives and messages of this thread, however they are called: also functional
    ones, those of compiled code, and those of objects. Barriers carry nothing and pass. Other
    threads go on. Not seen is what is written to `torch.distributed`'s key-value store, or goes
    through a process group that is itself written in Python.

    Args:
        model: The client's model.

    Raises:
        NotImplementedError: With the operation, and the way out.

    Example:
        >>> with no_exchange(model):
        ...     loss = model(**batch).loss
    """
    has_others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if has_others and not any(hasattr(p, "device_mesh") for p in model.parameters()):
        with _NoExchange(type(model).__name__):
            yield
    else:
        yield


class _NoExchange(TorchDispatchMode):
    """Lets every operation of this thread pass, but for those that exchange."""

    supports_higher_order_operators = True  # such as flex attention

    def __init__(self, model_name: str) -> None:
        super().__init__()
        self._model_name = model_name

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled modules run compiled: torch leaves them to the interpreter under other modes."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace in _EXCHANGES and "barrier" not in func.__name__:
            raise NotImplementedError(
                f"GradGuardTrainer does not support a loss that exchanges: {self._model_name} "
                f"calls {func.namespace}.{func.__name__.split('.')[0]} in its pass, so that the "
                "others would be sent a figure of this rank's own batch, unprotected. Compute the "
                "loss without it (compute_loss_func; loss_fn of protect), or train on one rank."
            )
        return func(*args, **(kwargs or {}))


_EXCHANGES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Where torch keeps the operations that `torch.distributed` and functional collectives end in."""
