"""Clients × shards: averages over clients, each of which may be on several devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from transformers.utils import logging

from ...gradient_map.devices import ONE, Devices
from ...gradient_map.sharding import Shards
from ..guards.checks import check_accelerator, check_loader
from .secure_aggregation import SecureAggregation

logger = logging.get_logger(__name__)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Clients = dist.ProcessGroup | DeviceMesh


class ClientRanks:
    """Devices of the same place in several clients, by the names that Accelerate has for the same
    things.

    Args:
        clients: The process group of one device of each client.
        client: The devices of this client.
        device: That they exchange from.

    Raises:
        ValueError: If the group also holds other devices of this client, or if devices in it have
            other shards: averages would be of unlike things. All devices must call it.
    """

    def __init__(self, clients: dist.ProcessGroup, client: Devices, device: torch.device) -> None:
        self._group = clients
        self.num_processes, self.process_index = self._group.size(), self._group.rank()
        self.device = device
        self._check(client)

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        """As `Accelerator.reduce`."""
        dist.all_reduce(tensor, group=self._group)
        return tensor / self.num_processes if reduction == "mean" else tensor

    def _check(self, client: Devices) -> None:
        inside, across = _members(client), set(dist.get_process_group_ranks(self._group))
        found = torch.tensor(client.fingerprint(), device=self.device)
        every = [torch.empty_like(found) for _ in range(self.num_processes)]
        dist.all_gather(every, found, group=self._group)
        alike = all(torch.equal(one, found) for one in every)
        sizes = client.gathered(torch.tensor(self.num_processes))
        if client.any(len(inside & across) != 1 or not alike) or len(set(sizes)) > 1:
            raise ValueError(
                "clients= has to hold one device of each client, in each the one that has the "
                "same shards. Make a mesh, init_device_mesh(kind, (clients, shards), "
                "mesh_dim_names=('clients', 'shards')); call fully_shard(model, "
                "mesh=mesh['shards']), and pass clients=mesh['clients']."
            )


def group_of(clients: Clients | None) -> Any:
    """The process group of a mesh's dimension.

    Example:
        >>> group_of(None)
    """
    get_group = getattr(clients, "get_group", None)
    return get_group() if get_group else clients


def _members(client: Devices) -> set[int]:
    if isinstance(client, Shards):
        return set(dist.get_process_group_ranks(client.group))
    return {dist.get_rank()}


def check_mesh(
    client: Devices,
    accelerator: Any,
    clients: Clients | None,
    secure: SecureAggregation | None = None,
) -> None:
    """Refuse what would average clients and shards together, and say, once, who is one client.

    Raises:
        ValueError: For an accelerator and `clients`, or an accelerator of several processes and a
            sharded model.
        NotImplementedError: For secure aggregation over anything but the accelerator.

    Example:
        >>> check_mesh(ONE, None, None)
    """
    if client is not ONE and clients is None and accelerator is None:
        logger.warning_once(_ONE_CLIENT.format(client.size))
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
    if client is not ONE:
        raise ValueError(
            "The model is sharded, so the accelerator's processes are devices of clients, and "
            "nothing says which of which. Pass clients=mesh['clients'] in the accelerator's place; "
            "clients=None if there is one client."
        )


_ONE_CLIENT = (
    "The model is sharded over {} devices, which count as one client: they add up true gradients "
    "among themselves, and protect() was given no clients=, so nothing leaves them. Where they are "
    "of different people, shard over the devices of one, and pass clients=mesh['clients']."
)
