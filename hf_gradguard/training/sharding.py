"""A client of several devices in a Trainer.

Accelerate shards the model by FSDP2 over a client's devices alone, each device protects its part of
the client's message, and messages cross clients.

Accelerate's dimensions are `dp_replicate`, here the clients, and `dp_shard`, a client's devices. By
itself it averages true gradients over both in the backward pass, and it knows no FSDP on CPUs. So
it is given a state that says FSDP, and dimensions to shard over that exclude clients. Everything
else is Accelerate's own code.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    broadcast_object_list,
)
from torch import Tensor, nn
from transformers import TrainingArguments

from ..data.private import write_private
from ..defenses import Message
from ..defenses.base import norm
from ..gradient_map import Tensors
from ..gradient_map.domain import count_rows
from ..gradient_map.parameters import is_sharded
from ..gradient_map.types import LossFunction
from ..gradient_map.views import ZeroGradient
from ..randomness import Stream
from ..sharded import ClientRanks as ClientRanks
from ..sharded import Shards
from ..sharded.shards import local
from .accelerator import GuardedAccelerator
from .exchange.gradients import AgreedTables, Ledger, SecureSum, average
from .exchange.start import StartAlike, agreed_upon, check_agreed
from .message import (
    ClientBatch,
    Loss,
    LossWeights,
    MessageMaker,
    Normalization,
    RandomStreams,
    Spread,
    Weights,
)
from .refusals import sizes_of

_STEPPED = "gradguard_stepped.json"


def shards_of(model: nn.Module) -> Shards:
    """Return the devices of a client whose model is cut over several.

    Args:
        model: The model, which `fully_shard` has cut.
    """
    return Shards(model)


class ClientParallelism(ParallelismConfig):
    """A parallelism configuration with which FSDP shards over a client's devices alone."""

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The names without `dp_replicate`, over which FSDP would average true gradients."""
        return [name for name in super().fsdp_dim_names if name != "dp_replicate"]


class ShardedAccelerator(GuardedAccelerator):
    """An accelerator that shards each client's model over the client's devices.

    Args:
        accelerator: The accelerator of all devices of all clients, as for `GuardedAccelerator`.
        ledger: The ledger, as for `GuardedAccelerator`.
        average: The function that averages, as for `GuardedAccelerator`.
        args: The training arguments, which say how many clients there are, and how FSDP shards.

    Raises:
        ValueError: If there are not as many processes as devices.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        ledger: Ledger,
        average: Callable[[Tensor], None],
        args: TrainingArguments,
    ) -> None:
        super().__init__(accelerator, ledger, average)
        clients, devices = sizes_of(args)
        if clients * devices != self.num_processes:
            raise ValueError(
                f"dp_replicate_size={clients} clients of dp_shard_size={devices} devices are "
                f"{clients * devices} processes, and {self.num_processes} were started."
            )
        plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
        if self.mixed_precision != "no":
            plugin.set_mixed_precision(self.mixed_precision)
        parallelism = ClientParallelism(dp_replicate_size=clients, dp_shard_size=devices)
        # A copy has a dictionary of its own: other accelerators of this process stay as they are.
        self.state = copy.copy(accelerator.state)
        self.state.distributed_type = DistributedType.FSDP
        self.state.fsdp_plugin, self.state.parallelism_config = plugin, parallelism
        self.state.device_mesh = parallelism.get_device_mesh(self.device.type)
        self._args = args
        self._shards: Shards | None = None
        self._clients: ClientRanks | None = None
        self._ledger.writes = version_of_part

    @property
    def num_senders(self) -> int:
        """The number of clients."""
        return int(self.parallelism_config.dp_replicate_size)

    def prepare(self, *objects: Any, **kwargs: Any) -> Any:
        """Prepare objects as Accelerate does, after all devices have got rank 0's model."""
        self._shards = self._clients = None
        for model in objects:
            if isinstance(model, nn.Module) and not is_sharded(model):
                check_agreed(agreed_upon(self._args, model), self.device)
                StartAlike().align(self._args, model)
                self._choose_layers(model)
        return super().prepare(*objects, **kwargs)

    def _choose_layers(self, model: nn.Module) -> None:
        """Choose the layers to shard among those that the model names.

        Accelerate shards token embeddings by themselves, so a layer that holds them, as BERT's
        first layer does, must not be sharded before.
        """
        plugin = self.state.fsdp_plugin
        if plugin.transformer_cls_names_to_wrap is not None:
            return
        tables = getattr(model, "get_input_embeddings", lambda: None)()
        kinds: dict[str, bool] = {}
        for module in model.modules():
            holds_tables = any(inner is tables for inner in module.modules())
            name = type(module).__name__
            kinds[name] = kinds.get(name, False) or holds_tables
        layers = getattr(model, "_no_split_modules", None) or ()
        chosen = [name for name in layers if not kinds.get(name, True)]
        plugin.transformer_cls_names_to_wrap = chosen

    def clip_grad_norm_(self, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Clip gradients as Accelerate does, and return the norm as a plain number."""
        total = super().clip_grad_norm_(parameters, *args, **kwargs)
        return total.full_tensor() if hasattr(total, "full_tensor") else total

    def note_stepped(self, model: nn.Module, optimizer: Any, folder: str | Path) -> None:
        """Write to a checkpoint the names of the parameters that an optimizer has stepped.

        It never steps a parameter that is withheld.
        """
        parameters = self.shards_of(model).parameters
        names = [name for name, parameter in parameters.items() if parameter in optimizer.state]
        if self.is_main_process:
            write_private(Path(folder) / _STEPPED, json.dumps(names).encode())

    @contextmanager
    def loading_optimizer(self, model: nn.Module, folder: str | Path) -> Iterator[None]:
        """Freeze parameters that the saved optimizer never stepped, while it is loaded.

        torch refuses to load a state that lacks a parameter that is trained.
        """
        path, names = Path(folder) / _STEPPED, [None]
        if self.is_main_process and path.is_file():  # the stock Trainer writes no such file
            names = [json.loads(path.read_text())]
        broadcast_object_list(names)
        parameters = self.shards_of(model).parameters
        stepped = parameters if names[0] is None else names[0]
        stepless = [p for n, p in parameters.items() if p.requires_grad and n not in stepped]
        for parameter in stepless:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in stepless:
                parameter.requires_grad_(True)

    def shards_of(self, model: nn.Module) -> Shards:
        """Return this client's devices.

        The model holds only its own shards afterwards.
        """
        if self._shards is None or self._shards.model is not model:
            self._shards = Shards(model)
        self._shards.reshard()
        return self._shards

    @property
    def shards(self) -> Shards:
        """The devices that `shards_of` returned last."""
        assert self._shards is not None  # a step begins by weighing batches, which asks for them
        return self._shards

    @property
    def clients(self) -> ClientRanks:
        """The group of one device of each client, all with the same shards.

        All devices must ask together.
        """
        if self._clients is None:
            group = self.state.device_mesh["dp_replicate"].get_group()
            self._clients = ClientRanks(group, self.shards, self.device)
        return self._clients


def version_of_part(gradient: Tensor) -> int:
    """Return how often this device's part was written to, which the backward pass alone does."""
    return local(gradient)._version


class ClientStreams(RandomStreams):
    """The streams of a client's devices, made from one key for each message.

    Args:
        streams: The streams of this device.
        accelerator: The accelerator, which knows the other devices.
    """

    def __init__(self, streams: RandomStreams, accelerator: ShardedAccelerator) -> None:
        self._of_device, self._accelerator = streams, accelerator

    def next_message(self, step: int) -> tuple[Stream, Stream, Stream | None]:
        """Return the streams of the next message.

        All devices of a client must call it.
        """
        noise, probes, dropout = self._of_device.next_message(step)
        return self._accelerator.shards.new_message(noise), probes, dropout


class ShardedMessages(MessageMaker):
    """The messages of clients of several devices, each of which makes its own part.

    Args:
        streams: The streams, as for `MessageMaker`.
        *args: All other arguments of `MessageMaker`.
        accelerator: The accelerator, which knows the devices.
    """

    def __init__(self, streams: RandomStreams, *args: Any, accelerator: ShardedAccelerator) -> None:
        super().__init__(ClientStreams(streams, accelerator), *args)
        self._accelerator = accelerator

    def share(
        self,
        module: nn.Module,
        turn: ClientBatch,
        loss_fn: LossFunction,
        step: int,
        runner: Any = None,
    ) -> Tensor:
        """Share a message as `MessageMaker` does.

        The mean of devices' losses is the client's loss.
        """
        try:
            return super().share(module, turn, loss_fn, step)
        finally:
            self._accelerator.shards_of(module).reshard()

    def _sharing(self, module: nn.Module) -> dict[str, Any]:
        return {**super()._sharing(module), "shards": self._accelerator.shards_of(module)}

    def _nothing(self, parameters: Mapping[str, nn.Parameter]) -> ZeroGradient:
        """Return a gradient of zeros as `MessageMaker` does, for this device's part."""
        nothing = ZeroGradient({name: local(p) for name, p in parameters.items()})
        nothing.shards = self._accelerator.shards
        return nothing

    @torch.no_grad()
    def _add(self, parameters: Mapping[str, nn.Parameter], shared: Message, weight: float) -> None:
        self._ledger.check(parameters.values(), "share a message")
        for name, parameter in parameters.items():
            weighted = shared[name].to(parameter.dtype).mul(weight)
            self._accelerator.shards.add_to_grad(parameter, weighted)
        self._ledger.write(parameters.values())

    def _record(self, gradient: Tensors, message: Message, _: float, start: float) -> None:
        """Record metrics as `MessageMaker` does, for the whole client's gradient."""
        shards = self._accelerator.shards
        metrics = {"seconds": time.perf_counter() - start, **message.metrics}
        change = {name: message[name] - part for name, part in gradient.items()}
        error, size, shared = (norm(tensors, shards) for tensors in (change, gradient, message))
        if size:
            metrics["relative_error"] = error / size
        if size and shared:
            cosine = (size**2 + shared**2 - error**2) / (2 * size * shared)
            metrics["cosine"] = max(-1, min(1, cosine))
        for name, figure in metrics.items():
            self._metrics[f"defense/{name}"].append(figure)

    @torch.no_grad()
    def average(
        self,
        parameters: Sequence[nn.Parameter],
        accelerator: Accelerator,
        secure: SecureSum | None = None,
    ) -> None:
        """Average as `MessageMaker` does, but each device with those of the same shards."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        parts = [local(p.grad) for p in parameters]
        average(parts, self._accelerator.clients, bits=32)


class ShardedTables(AgreedTables):
    """The tables that the input indexes, of models that are cut over a client's devices."""

    _accelerator: ShardedAccelerator

    def agree(self, model: nn.Module, *args: Any, **kwargs: Any) -> bool:
        """Agree on tables as `AgreedTables` does."""
        kwargs["shards"] = self._accelerator.shards_of(model)
        return super().agree(model, *args, **kwargs)


@dataclass(frozen=True)
class ShardedNormalization(Normalization):
    """A normalization of devices' losses whose mean is the client's mean loss."""

    def mean_loss(
        self, loss: Loss, spread: Spread, module: nn.Module, batch: dict[str, Any]
    ) -> Tensor:
        """Return a device's loss as `Normalization` does.

        `spread.items` are all items that the loss is given: a device may have none itself.
        """
        items = None if self.num_items is None else spread.items
        return loss(module, batch, items) / (self.rank_factor / spread.loss)


class ShardedWeights(LossWeights):
    """The weights that clients' losses would have, were each client on one device.

    FSDP averages gradients over the S devices of a client. Of C items, which have a loss A/n + B on
    each device, the client's mean loss is the mean over devices of S A/C + (N/C) B.

    Args:
        loss: The Trainer's loss.
        accelerator: The accelerator, which knows the devices.
    """

    def __init__(self, loss: Loss, accelerator: ShardedAccelerator) -> None:
        super().__init__(loss)
        self._accelerator = accelerator

    def __call__(
        self, module: nn.Module, batches: Sequence[dict[str, Any]], normalization: Normalization
    ) -> Weights:
        """Return the weights as `LossWeights` does, for the one client that this device is of.

        Raises:
            NotImplementedError: If the loss depends on `num_items_in_batch` in another way than a
                sum or a mean does.
        """
        shards, (batch,) = self._accelerator.shards_of(module), batches
        counted = normalization.num_items is not None
        size = (normalization.items(batch) or 0) if counted else count_rows(batch)
        of_client = sum(shards.gathered(torch.tensor(float(size))))
        if not of_client:
            return Weights([0.0])
        factor = 1.0 if normalization.accumulated else 1.0 / normalization.accumulation
        share = shards.size * size / of_client
        if normalization.num_items is None:
            return Weights([factor], Spread(loss=share))
        num_items = float(normalization.num_items)
        if normalization.rank_factor == 1:  # counted on this device alone
            num_items = sum(shards.gathered(torch.tensor(num_items)))
        else:
            factor *= self._accelerator.num_senders
        items, ratio = num_items / shards.size, num_items / of_client
        if self._is_mean_for(module, batch, shards):
            return Weights([factor], Spread(items, share))
        return Weights([factor / ratio], Spread(items, ratio))

    def _is_mean_for(self, module: nn.Module, batch: dict[str, Any], shards: Shards) -> bool:
        """Return whether the loss is a mean, as the devices say whose batches can tell."""
        if self._is_mean is None:
            answer, failure = None, None
            try:
                answer = self._takes_a_mean(module, batch)
            except NotImplementedError as error:
                failure = error  # the other devices would wait, so they are told first
            shards.reshard()
            if shards.any(failure is not None):
                raise failure or NotImplementedError("Another device of this client refused.")
            is_sum, is_mean = shards.any(answer is False), shards.any(answer is True)
            self._is_mean = False if is_sum else True if is_mean else None
        return bool(self._is_mean)
