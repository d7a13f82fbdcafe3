"""A client's devices where `torch.distributed.fsdp.fully_shard` has cut its model over them.

The backward pass of `fully_shard` averages gradients over the devices of its mesh and leaves each
with the rows that it holds. The mesh has to be of one client: what it averages is not protected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..randomness import KEY_BYTES, Stream
from .devices import ONE, Devices, How, devices, later_sums


class Shards(Devices):
    """The devices of a client whose model is sharded.

    Args:
        model: With parameters that `fully_shard` cut by rows over a mesh of one dimension, and
            maybe some that it was to ignore, which every device holds.

    Raises:
        NotImplementedError: If it is cut in another way.
    """

    def __init__(self, model: nn.Module) -> None:
        from torch.distributed.tensor import DTensor

        self.model = model
        reshard(model)
        self.parameters = dict(model.named_parameters())
        cut = {n: p for n, p in self.parameters.items() if isinstance(p, DTensor)}
        _check_cut(model, cut)
        self.replicated = frozenset(self.parameters.keys() - cut.keys())
        mesh: Any = next(iter(cut.values())).device_mesh
        self.group: dist.ProcessGroup = mesh.get_group()
        self.size, self.rank = self.group.size(), self.group.rank()
        self.device = _device_of(mesh.device_type)
        self._common: Stream | None = None

    def fingerprint(self) -> list[int]:
        parts = [(n, tuple(local(p).shape), str(p.dtype)) for n, p in self.parameters.items()]
        digest = hashlib.blake2b(repr(parts).encode(), digest_size=7).digest()
        return [self.rank, self.size, int.from_bytes(digest, "little")]

    def new_message(self, generator: Stream) -> Stream:
        """From a key that the first device draws come a stream for each device, and one for
        parameters that all of them hold.
        """
        key = torch.frombuffer(bytearray(generator.bytes(KEY_BYTES)), dtype=torch.uint8)
        key = key.to(self.device)
        dist.broadcast(key, group=self.group, group_src=0)
        self._common = Stream(bytes(key.tolist()))
        return [self._common.spawn() for _ in range(self.size)][self.rank]

    def each(self, figures: Mapping[str, Tensor], how: How = "sum") -> dict[str, Tensor]:
        if not figures:
            return {}
        whole = self._gather(torch.stack([figure.double() for figure in figures.values()]))
        if how != "sum":
            joined = whole.amin(0) if how == "min" else whole.amax(0)
            return dict(zip(figures, joined, strict=True))
        # of what all hold, the first's
        found = zip(figures, whole.sum(0), whole[0], strict=True)
        return {n: first if n in self.replicated else all_ for n, all_, first in found}

    def any(self, flag: bool) -> bool:
        return bool(self._gather(torch.tensor(flag, dtype=torch.uint8)).any())

    def gathered(self, number: Tensor) -> list[float]:
        return [float(one) for one in self._gather(number)]

    def add(self, tensor: Tensor) -> Tensor:
        return self._gather(tensor).sum(0)

    def counts(self, name: str) -> bool:
        return self.rank == 0 or name not in self.replicated

    def later(self, figures: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parts = self._gather(torch.stack(list(figures.values())))
        whole, after = self.each(figures), parts[self.rank + 1 :].sum(0)
        found = zip(later_sums(whole).items(), after, strict=True)
        return {n: sum_ if n in self.replicated else sum_ + own for (n, sum_), own in found}

    def sums(self, name: str, sums: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if len(sums) == 1 or name in self.replicated:
            return sums
        return sums[0], self.add(sums[1])

    def streams(
        self, tensors: Mapping[str, Tensor], generator: Stream
    ) -> Iterator[tuple[dict[str, Tensor], Stream]]:
        assert self._common is not None
        for alike, stream in ((False, generator), (True, self._common)):
            some = {n: t for n, t in tensors.items() if (n in self.replicated) == alike}
            if some:
                yield some, stream

    def check_present(self) -> None:
        if devices() is not self:
            raise RuntimeError(
                "This gradient is one device's part of its client's. hf_gradguard.protect takes "
                "norms, ranges and ranks over all of them: nothing else may use it."
            )

    def gradient(
        self,
        loss: Tensor,
        parameters: Mapping[str, nn.Parameter],
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> dict[str, Tensor]:
        """The mean of devices' gradients, of which `fully_shard` gives each its part."""
        if retain_graph or create_graph:
            raise NotImplementedError(_TWICE)
        before = [(parameter, parameter.grad) for parameter in self.parameters.values()]
        for parameter in self.parameters.values():
            parameter.grad = None
        try:
            _let_reduce(self.model)
            loss.backward()
            if all(self.parameters[name].grad is None for name in parameters):
                raise ValueError("The loss is not computed from any shared parameter.")
            return {name: self._mean(name) for name in parameters}
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient

    def _mean(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        if parameter.grad is None:
            part = torch.zeros_like(local(parameter), requires_grad=False)
        else:
            part = local(parameter.grad)
        if name not in self.replicated:  # the backward pass has averaged it
            return part
        dist.all_reduce(part, group=self.group)
        return part.div_(self.size)

    def _gather(self, tensor: Tensor) -> Tensor:
        """`(devices, *shape)`: in one order, so that what is computed of it is the same on all."""
        place, tensor = tensor.device, tensor.to(self.device).contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor, group=self.group)
        return torch.stack(parts).to(place)


def devices_for(model: nn.Module, second_order: bool) -> Devices:
    """`devices()`, if they are those of a map of this model.

    Raises:
        NotImplementedError: If the model is sharded, and they are not; or for second derivatives of
            a sharded model.

    Example:
        >>> devices_for(nn.Linear(2, 2), second_order=True) is ONE
        True
    """
    found = devices()
    if is_sharded(model) and (second_order or not isinstance(found, Shards)):
        raise NotImplementedError(
            _TWICE
            if second_order
            else "No device holds all of a sharded model's gradient. hf_gradguard.protect "
            "protects it shard by shard; what asks for a GradientMap needs the whole model."
        )
    return found if isinstance(found, Shards) and found.model is model else ONE


def devices_of(model: nn.Module) -> Devices:
    """Those that a model is sharded over.

    Raises:
        NotImplementedError: If it is sharded, and not by rows over a mesh of one dimension.

    Example:
        >>> devices_of(nn.Linear(2, 2)) is ONE
        True
    """
    return Shards(model) if is_sharded(model) else ONE


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard`, or something else, has cut a model's parameters.

    Example:
        >>> is_sharded(nn.Linear(2, 2))
        False
    """
    cut = any(hasattr(p, "device_mesh") for p in model.parameters())
    return cut or bool(fsdp_modules(model)) or _is_flat(model)


def local(tensor: Any) -> Tensor:
    """This device's part of a tensor."""
    part: Tensor = tensor.detach()
    return part.to_local() if hasattr(part, "to_local") else part


def whole_of(parameter: Any, part: Tensor) -> Tensor:
    """This device's part of a tensor like a parameter, as the parameter is."""
    if not hasattr(parameter, "device_mesh"):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def fsdp_modules(model: nn.Module) -> list[Any]:
    """What `fully_shard` was called with, of a model and all that is in it."""
    return [m for m in model.modules() if _is_a(m, "FSDPModule")]


def reshard(model: nn.Module) -> None:
    """Let a model hold its own shards alone again: without a backward pass, a forward pass leaves
    the outermost module's parameters whole.
    """
    for module in fsdp_modules(model):
        module.reshard()


def whole_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a forward pass uses, by name: of a sharded model the whole ones, in
    storages that are empty in between.
    """
    found = dict(model.named_parameters())
    for module in fsdp_modules(model):
        module.unshard()
        found |= {n: p for n, p in model.named_parameters() if not hasattr(p, "device_mesh")}
        module.reshard()
    return found


def _check_cut(model: nn.Module, cut: Mapping[str, Any]) -> None:
    if _is_flat(model):
        raise NotImplementedError(
            "FullyShardedDataParallel (the first FSDP) keeps no parameter by itself, so nothing "
            "can be protected by name. Use torch.distributed.fsdp.fully_shard."
        )
    inside = {id(p) for module in fsdp_modules(model) for p in module.parameters()}
    meshes = {p.device_mesh for p in cut.values()}
    if not cut or any(id(p) not in inside for p in cut.values()):
        raise NotImplementedError(
            "The model is sharded, but not by fully_shard: no device holds a whole local gradient, "
            "and nothing says how parts add up. Call torch.distributed.fsdp.fully_shard on it."
        )
    if len(meshes) > 1 or any(mesh.ndim > 1 for mesh in meshes):
        raise NotImplementedError(
            "The model is sharded over a mesh of several dimensions (HSDP, or with tensor "
            "parallelism): its backward pass would average true gradients over clients before "
            "they could be protected. Call fully_shard(model, mesh=mesh['shards']) with the "
            "dimension inside a client alone, and give protect() the other one, "
            "clients=mesh['clients']."
        )
    for name, parameter in cut.items():
        (placement,) = parameter.placements
        if not placement.is_shard(0):
            raise NotImplementedError(
                f"{name} is cut by {placement}, and not by rows. Leave shard_placement_fn of "
                "fully_shard out."
            )


def _let_reduce(model: nn.Module) -> None:
    """Devices exchange in the next backward pass, whatever a loop has set: a message is of all."""
    for module in fsdp_modules(model):
        module.set_requires_gradient_sync(True)
        module.set_is_last_backward(True)


def _is_flat(model: nn.Module) -> bool:
    return any(_is_a(module, "FullyShardedDataParallel") for module in model.modules())


def _is_a(module: nn.Module, name: str) -> bool:
    """By name: importing torch.distributed.fsdp takes its time."""
    return any(one.__name__ == name for one in type(module).__mro__)


def _device_of(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


_TWICE = (
    "Second derivatives of a sharded model: the backward pass of fully_shard reduces gradients, "
    "and leaves no graph of them. What needs them (soteria, refiner, and sensitivities of models "
    "with kinks such as ReLU) works where each rank holds the whole model."
)
