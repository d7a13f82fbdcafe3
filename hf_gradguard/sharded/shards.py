"""The devices of one client, and what is computed over all of them; nothing leaves the client.

The backward pass of `fully_shard` averages gradients over the devices of its mesh and leaves each
with the rows that it holds. All devices of the mesh must belong to one client: what the mesh
averages is not protected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..gradient_map.types import How
from ..randomness import KEY_BYTES, Stream


class Shards:
    """The devices of a client whose model is sharded; all of them have to call its methods.

    Args:
        model: A model with parameters that `fully_shard` cut by rows over a mesh of one dimension,
            and perhaps parameters that it ignored, which every device holds.

    Raises:
        NotImplementedError: If the model is cut in another way.
    """

    def __init__(self, model: nn.Module) -> None:
        from torch.distributed.tensor import DTensor

        self.model = model
        self.reshard()
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
        """Return numbers that must agree between devices of several clients that are averaged.

        They are the device's place, the number of the client's devices, and a hash of the names,
        shapes and types of its shards.
        """
        shapes = [(n, tuple(local(p).shape), str(p.dtype)) for n, p in self.parameters.items()]
        digest = hashlib.blake2b(repr(shapes).encode(), digest_size=7).digest()
        return [self.rank, self.size, int.from_bytes(digest, "little")]

    def joined(self, numbers: Mapping[str, Tensor], how: How = "sum") -> dict[str, Tensor]:
        """Combine numbers of each device's shards into numbers of whole parameters, by name.

        Args:
            numbers: One number for each parameter, of this device's shard.
            how: How the numbers of several shards are combined.
        """
        if not numbers:
            return {}
        gathered = self._gather(torch.stack([number.double() for number in numbers.values()]))
        # A minimum of equal copies is the copy; a sum would count what all hold several times.
        if how != "sum":
            joined = gathered.amin(0) if how == "min" else gathered.amax(0)
            return dict(zip(numbers, joined, strict=True))
        sums, of_first_device = gathered.sum(0), gathered[0]
        return {
            name: of_first_device[index] if name in self.replicated else sums[index]
            for index, name in enumerate(numbers)
        }

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true on any device."""
        return bool(self._gather(torch.tensor(flag, dtype=torch.uint8)).any())

    def union(self, names: frozenset[str]) -> frozenset[str]:
        """Return those of the model's parameters that any device names."""
        flags = {name: torch.tensor(float(name in names)) for name in self.parameters}
        return frozenset(name for name, flag in self.joined(flags, "max").items() if flag)

    def gathered(self, number: Tensor) -> list[float]:
        """Return each device's number, in the order of devices."""
        return [float(of_device) for of_device in self._gather(number)]

    def add(self, tensor: Tensor) -> Tensor:
        """Return the sum of devices' tensors, which has the same bits on all of them."""
        return self._gather(tensor).sum(0)

    def sums(self, name: str, sums: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return row and column sums of a shard of a matrix; column sums are the whole matrix's."""
        if len(sums) == 1 or name in self.replicated:
            return sums
        return sums[0], self.add(sums[1])

    def counts(self, name: str) -> bool:
        """Return whether this device's copy of a parameter counts.

        Of a parameter that all devices hold, only the first device's copy counts.
        """
        return self.rank == 0 or name not in self.replicated

    def add_later_(
        self, later_sums: Tensor, contributions: Tensor, position: Tensor, sizes: Mapping[str, int]
    ) -> None:
        """Add other devices' later entries to sums over this device's later entries.

        The sums are changed in place. Parameters are in their order, and devices in theirs within a
        parameter.

        Args:
            later_sums: The sums, `(k,)`, which are written to.
            contributions: The numbers that are summed, `(k,)`.
            position: The places of the entries in this device's parameters end to end, `(k,)`.
            sizes: How many entries of each parameter this device has.
        """
        ends = torch.tensor(list(sizes.values()), device=position.device).cumsum(0)
        bounds = torch.searchsorted(position, ends).tolist()
        slices = {
            name: slice(start, end)
            for name, start, end in zip(sizes, [0, *bounds[:-1]], bounds, strict=True)
        }
        own_sums = {name: contributions[entries].sum() for name, entries in slices.items()}
        later_here, later_everywhere = _later_sums(own_sums), self._sums_later(own_sums)
        for name, entries in slices.items():
            later_sums[entries] += (later_everywhere[name] - later_here[name]).to(later_sums.dtype)

    def _sums_later(self, numbers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sum of the numbers of all shards that stand after this device's shard."""
        gathered = self._gather(torch.stack(list(numbers.values())))
        later_parameters = _later_sums(self.joined(numbers))
        pairs = zip(later_parameters.items(), gathered[self.rank + 1 :].sum(0), strict=True)
        return {
            name: later if name in self.replicated else later + later_devices
            for (name, later), later_devices in pairs
        }

    def new_message(self, generator: Stream) -> Stream:
        """Return this device's stream for the next message.

        The first device draws a key from `generator`. From it come a stream for each device, and
        one for the parameters that all of them hold.
        """
        # All devices need the same noise on what all hold, and other noise on their own rows: so
        # they agree on a key, from which each takes its own stream.
        key = torch.frombuffer(bytearray(generator.bytes(KEY_BYTES)), dtype=torch.uint8)
        key = key.to(self.device)
        dist.broadcast(key, group=self.group, group_src=0)
        self._common = Stream(bytes(key.tolist()))
        return [self._common.spawn() for _ in range(self.size)][self.rank]

    def stream_of(self, name: str, generator: Stream) -> Stream:
        """Return the stream of a parameter's random numbers: the common one if all devices hold it.

        Raises:
            RuntimeError: If `new_message` was not called.
        """
        if self._common is None:
            raise RuntimeError(
                "This gradient is one device's part of its client's, and what all devices hold "
                "needs the same noise on each: hf_gradguard.protect draws it (Shards.new_message)."
            )
        return self._common if name in self.replicated else generator

    def streams(
        self, tensors: Mapping[str, Tensor], generator: Stream
    ) -> Iterator[tuple[dict[str, Tensor], Stream]]:
        """Yield tensors in two groups, each with the stream that its random numbers come from."""
        for is_common in (False, True):
            group = {
                name: tensor
                for name, tensor in tensors.items()
                if (name in self.replicated) == is_common
            }
            if group:
                yield group, self.stream_of(next(iter(group)), generator)

    def gradient(self, loss: Tensor, parameters: Iterable[str]) -> dict[str, Tensor]:
        """Return this device's shard of the mean of devices' gradients; `.grad` does not change.

        Args:
            loss: This device's loss.
            parameters: Names of the parameters.

        Raises:
            ValueError: If the loss does not depend on any of them.
        """
        gradients_before = [(parameter, parameter.grad) for parameter in self.parameters.values()]
        for parameter in self.parameters.values():
            parameter.grad = None
        # fully_shard writes to `.grad`, which holds what other messages added up.
        try:
            self._let_reduce()
            loss.backward()
            if all(self.parameters[name].grad is None for name in parameters):
                raise ValueError("The loss is not computed from any shared parameter.")
            return {name: self._mean(name) for name in parameters}
        finally:
            for parameter, gradient in gradients_before:
                parameter.grad = gradient

    def add_to_grad(self, parameter: nn.Parameter, gradient_part: Tensor) -> None:
        """Add this device's shard of a gradient to `.grad`, which is cut as the parameter is."""
        if parameter.grad is None:
            parameter.grad = whole_of(parameter, gradient_part)
        else:
            local(parameter.grad).add_(gradient_part)

    def version(self, parameter: nn.Parameter) -> int:
        """Return how often this device's shard of a parameter was written to."""
        return local(parameter)._version

    def reshard(self) -> None:
        """Free the whole parameters, so that the model holds only its own shards again.

        Without a backward pass, a forward pass leaves the outermost module's parameters whole.
        """
        for module in fsdp_modules(self.model):
            module.reshard()

    def whole_parameters(self) -> dict[str, nn.Parameter]:
        """Return the whole parameters that a forward pass uses, by name.

        Their storages are empty outside of a pass.
        """
        parameters = dict(self.model.named_parameters())
        for module in fsdp_modules(self.model):
            module.unshard()
            parameters |= {
                name: parameter
                for name, parameter in self.model.named_parameters()
                if not _is_cut(parameter)
            }
            module.reshard()
        return parameters

    def _mean(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        if parameter.grad is None:
            local_gradient = torch.zeros_like(local(parameter), requires_grad=False)
        else:
            local_gradient = local(parameter.grad)
        if name not in self.replicated:  # the backward pass has averaged it
            return local_gradient
        dist.all_reduce(local_gradient, group=self.group)
        return local_gradient.div_(self.size)

    def _let_reduce(self) -> None:
        """Let devices exchange in the next backward pass, whatever a loop has set."""
        for module in fsdp_modules(self.model):
            module.set_requires_gradient_sync(True)
            module.set_is_last_backward(True)

    def _gather(self, tensor: Tensor) -> Tensor:
        """Return `(devices, *shape)` in the order of devices, so that all compute the same."""
        original_device, tensor = tensor.device, tensor.to(self.device).contiguous()
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor, group=self.group)
        return torch.stack(gathered).to(original_device)


def local(tensor: Any) -> Tensor:
    """Return this device's shard of a tensor, or the tensor itself if it is not cut."""
    detached: Tensor = tensor.detach()
    return detached.to_local() if hasattr(detached, "to_local") else detached


def whole_of(parameter: Any, local_tensor: Tensor) -> Tensor:
    """Return this device's shard as a tensor that is cut like a parameter."""
    if not _is_cut(parameter):
        return local_tensor
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local_tensor,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Return all modules in a model that `fully_shard` was called with."""
    return [m for m in model.modules() if _is_a(m, "FSDPModule")]


def _check_cut(model: nn.Module, cut: Mapping[str, Any]) -> None:
    if _is_flat(model):
        raise NotImplementedError(
            "FullyShardedDataParallel (the first FSDP) keeps no parameter by itself, so nothing "
            "can be protected by name. Use torch.distributed.fsdp.fully_shard."
        )
    wrapped_ids = {id(p) for module in fsdp_modules(model) for p in module.parameters()}
    meshes = {p.device_mesh for p in cut.values()}
    if not cut or any(id(p) not in wrapped_ids for p in cut.values()):
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


def _is_flat(model: nn.Module) -> bool:
    return any(_is_a(module, "FullyShardedDataParallel") for module in model.modules())


def _is_a(module: nn.Module, name: str) -> bool:
    """Return whether a module's class has this name, without the slow import of FSDP."""
    return any(kind.__name__ == name for kind in type(module).__mro__)


def _device_of(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _is_cut(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "device_mesh")


def _later_sums(numbers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return for each name the sum of those after it."""
    if not numbers:
        return {}
    stacked = torch.stack(list(numbers.values()))
    later_sums = stacked.flip(0).cumsum(0).flip(0) - stacked
    return dict(zip(numbers, later_sums, strict=True))
