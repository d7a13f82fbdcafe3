"""Protection in a user's own training loop: `protect` takes the place of `backward`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers.utils import logging

from ..defenses import Defense, Message, make_defense
from ..defenses.base import NoDefense
from ..gradient_map import GradientMap
from ..gradient_map.domain import check_batch
from ..gradient_map.exchanges import no_exchange
from ..gradient_map.inputs import model_loss
from ..gradient_map.parameters import is_sharded, shared_parameters
from ..gradient_map.types import LossFunction, Shards
from ..randomness import private_draws
from .exchange.gradients import AgreedTables, SecureSum, average, warn_of_statistics
from .guards.hooks import (
    Differentiation,
    check_hooks,
    hooks_of,
    hooks_of_accumulation,
    hooks_of_module,
    packs_tensors,
    run_hooks_on_sums,
)
from .learning_rate import warn_of_noise
from .message import BufferGuard, RandomStreams, RowGuard, state_guard
from .privacy.proofs import is_proved
from .refusals import (
    SHARDED_DEFENSE,
    check_accelerator,
    check_loader,
    check_model,
    reason_of_sharding,
    refusal,
)

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    Clients = dist.ProcessGroup | DeviceMesh

logger = logging.get_logger(__name__)


def protect(
    model: nn.Module,
    batch: Mapping[str, Any],
    defense: str | Defense,
    accelerator: Any = None,
    loss_fn: LossFunction | None = None,
    clients: Clients | None = None,
    secure: SecureSum | None = None,
) -> Tensor:
    """Differentiate the loss of a batch, and add the protected gradient to `.grad`.

    Call it in the place of `loss = model(**batch).loss; accelerator.backward(loss)`. Tables that
    the input indexes, such as token embeddings, get no gradient.

    Args:
        model: A model that `GradientMap` takes. A wrapper of DDP or Fabric around it is ignored.
        batch: The output of a collator, labels included, on the model's device.
        defense: The name of a defense, or a defense. A name stands for one object as long as the
            model lives. An object's `state_dict` belongs in your checkpoint.
        accelerator: An accelerator of Accelerate, or Lightning's Fabric. The gradient is averaged
            over its processes, all of which must call this, and divided by its accumulation steps.
            Without one, the gradient is this process's own.
        loss_fn: A function `(model, batch) -> scalar` that returns the batch-mean loss. By default
            it is the loss that the model returns.
        clients: The process group, or a mesh's dimension, over which clients are averaged, in the
            place of an accelerator. If `fully_shard` has cut the model over another dimension, a
            client has several devices, and each protects its shards of the client's gradient.
            Without `clients`, nothing leaves the client.
        secure: A `SecureAggregation(accelerator)`, which shows processes the mean alone.

    Returns:
        The batch-mean loss, detached.

    Raises:
        NotImplementedError: If the model or the accelerator cannot be protected (`refusals.py`).
        FloatingPointError: If the true or the protected gradient is not finite.
        ValueError: If there is no loss, nothing to share, or no continuous input that the defense
            needs.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loss = protect(model, batch, "optimal_noise")
        >>> optimizer.step()
    """
    module = _bare(model)
    shards = _shards_of(module)
    carrier = getattr(clients, "get_group", lambda: clients)()  # a mesh's dimension has a group
    check_model(module, sharded=shards is not None)
    _check_carriers(shards, accelerator, carrier, secure)
    loop = _LOOPS.setdefault(module, _Loop())
    ranks, loss_fn = loop.ranks(accelerator, carrier, module, shards), loss_fn or model_loss
    defense = loop.prepared(module, defense, shards, _steps_of(accelerator))
    check_batch(module, batch, defense.facts.needs_input)
    with loop.state_guard.watch(module, batch, loss_fn):
        if ranks is not None:
            loop.tables(ranks).agree(module, batch, loss_fn, secure, shards)
        gmap, message = _message(module, batch, defense, loss_fn, shards)
        loop.rows.compare(gmap.gradient() if loop.rows.remaining else {}, message)
    _add(gmap, message, ranks, _steps_of(accelerator), secure)
    return gmap.loss


def _steps_of(accelerator: Any) -> int:
    """Return how many batches one optimizer step of an accelerator adds up."""
    return int(getattr(accelerator, "gradient_accumulation_steps", 1))


@torch.no_grad()
def _add(
    gmap: GradientMap, message: Message, ranks: Any, steps: int, secure: SecureSum | None
) -> None:
    """Add a message to `.grad`, averaged over ranks."""
    shared = [message[n].to(p.dtype, copy=True) for n, p in gmap.parameters.items()]
    if ranks is not None:
        average(shared, ranks, secure, bits=32)
    for parameter, gradient in zip(gmap.parameters.values(), shared, strict=True):
        gradient /= steps
        if gmap.shards is not None:
            gmap.shards.add_to_grad(parameter, gradient)
        elif parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
    run_hooks_on_sums(gmap.parameters.values())


def _message(
    module: nn.Module,
    batch: Mapping[str, Any],
    defense: Defense,
    loss_fn: LossFunction,
    shards: Shards | None,
) -> tuple[GradientMap, Message]:
    noise, _, dropout = RandomStreams().next_message(0)
    if shards is not None:
        noise = shards.new_message(noise)
    device = next(module.parameters()).device
    if isinstance(defense, NoDefense):
        dropout = None
    with no_exchange(module), nullcontext() if dropout is None else private_draws(dropout, device):
        gmap = defense.gradient_map(module, batch, loss_fn=loss_fn, shards=shards)
        return gmap, defense(gmap, noise)


class _FabricRanks:
    """An adapter that gives Lightning's Fabric the names of Accelerate."""

    def __init__(self, fabric: Any) -> None:
        self._fabric = fabric
        self.num_processes, self.process_index = fabric.world_size, fabric.global_rank
        self.device = fabric.device

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        reduced: Tensor = self._fabric.all_reduce(tensor, reduce_op=reduction)
        return reduced


class _Loop:
    """The state of a model's training loop, from one call of `protect` to the next."""

    def __init__(self) -> None:
        self.rows, self.state_guard = RowGuard(), BufferGuard()
        self._named: dict[str, Defense] = {}
        self._prepared: Defense | None = None
        self._ranks: tuple[Any, Any] = None, None
        self._tables: AgreedTables | None = None
        self._has_begun = False

    def ranks(
        self, accelerator: Any, clients: Any, module: nn.Module, shards: Shards | None
    ) -> Any:
        """Return the object that averages messages over ranks; `None` if nothing does."""
        carrier_of = accelerator if clients is None else clients
        if carrier_of is not self._ranks[0]:
            carrier = accelerator
            if clients is not None:
                from .sharding import ClientRanks

                carrier = ClientRanks(clients, shards, next(module.parameters()).device)
            elif hasattr(carrier_of, "all_reduce") and not isinstance(carrier_of, Accelerator):
                carrier = _FabricRanks(carrier_of)
            self._ranks, self._tables = (carrier_of, carrier), None
            warn_of_statistics(module, "local")
        return self._ranks[1]

    def tables(self, ranks: Any) -> AgreedTables:
        """Return the tables that all ranks withhold."""
        self._tables = self._tables or AgreedTables(ranks)
        return self._tables

    def prepared(
        self, module: nn.Module, defense: str | Defense, shards: Shards | None, steps: int
    ) -> Defense:
        """Return the defense, prepared for the model.

        The model's hooks are checked for a step that adds up so many messages.
        """
        if isinstance(defense, str):
            if defense not in self._named:
                self._named[defense] = make_defense(defense)
            defense = self._named[defense]
        if shards is not None and (values := reason_of_sharding(defense)):
            raise SHARDED_DEFENSE.error(values)
        if defense is not self._prepared:
            defense.prepare(module)
            warn_of_noise(defense)
            self.state_guard = state_guard(is_proved(defense), "local", _KEEP_STATE)
            self._prepared = defense
        self._check_hooks(module, defense, steps)
        return defense

    def _check_hooks(self, module: nn.Module, defense: Defense, steps: int) -> None:
        # The search through autograd's graph takes a while, so it is done once.
        hooks = hooks_of(module)
        if not self._has_begun:
            hooks += hooks_of_accumulation(module)
        if hooks or packs_tensors():
            shared_names = shared_parameters(module)
            check_hooks(module, hooks, Differentiation(defense, messages=steps), shared_names)
        self._has_begun = True


def _shards_of(model: nn.Module) -> Shards | None:
    """Return the client's devices, or `None` if the model is not cut over several."""
    if not is_sharded(model):
        return None
    from .sharding import shards_of

    return shards_of(model)


def _check_carriers(
    shards: Shards | None, accelerator: Any, clients: Any, secure: SecureSum | None
) -> None:
    """Refuse an exchange that would average clients and shards together.

    A warning says once which devices count as one client.

    Raises:
        ValueError: If both an accelerator and `clients` are given, or an accelerator of several
            processes and a sharded model.
        NotImplementedError: If secure aggregation is over anything but the accelerator.
    """
    if shards is not None and clients is None and accelerator is None:
        logger.warning_once(_ONE_CLIENT.format(shards.size))
    if secure is not None:
        secure.check_carrier(accelerator)
    if accelerator is None:
        return
    if isinstance(accelerator, Accelerator):
        check_accelerator(accelerator)
        for loader in accelerator._dataloaders:
            check_loader(loader)
    if clients is not None:
        raise ValueError("Pass accelerator or clients, not both: each says what is averaged over.")
    if shards is not None:
        raise ValueError(
            "The model is sharded, so the accelerator's processes are devices of clients, and "
            "nothing says which of which. Pass clients=mesh['clients'] in the accelerator's place; "
            "clients=None if there is one client."
        )


_KEEP_STATE = (
    "Put these modules in eval mode if they write in training alone; or compute this elsewhere "
    "than in forward, from public data."
)
_ONE_CLIENT = (
    "The model is sharded over {} devices, which count as one client: they add up true gradients "
    "among themselves, and protect() was given no clients=, so nothing leaves them. Where they are "
    "of different people, shard over the devices of one, and pass clients=mesh['clients']."
)


def _bare(model: Any) -> nn.Module:
    """Return the module inside a wrapper that would exchange gradients by itself."""
    module: nn.Module = model
    wrapped = isinstance(module, nn.parallel.DistributedDataParallel)
    if not wrapped and type(module).__name__ != "_FabricModule":
        return module
    if wrapped:
        if module._forward_hooks or module._forward_pre_hooks or [*hooks_of_module(module, "")]:
            raise refusal("hook-on-wrapper")
        logger.warning_once(
            "The model is wrapped in DistributedDataParallel, whose reducer is not used: it would "
            "average true gradients. protect() averages protected ones."
        )
        # Otherwise its next forward pass, as in an evaluation, sends rank 0's data statistics.
        model.broadcast_buffers = False
    return _bare(model.module)


_LOOPS: WeakKeyDictionary[nn.Module, _Loop] = WeakKeyDictionary()
