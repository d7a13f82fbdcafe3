"""Averages over clients, each of which may have several devices."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..gradient_map.types import Shards


class ClientRanks:
    """The devices with the same shard in several clients, with the interface of an `Accelerator`.

    Args:
        clients: The process group of one device of each client.
        shards: The devices of this client; `None` if it has only one.
        device: The device to exchange from.

    Raises:
        ValueError: If the group also holds other devices of this client, or devices with other
            shards, which cannot be averaged. All devices must call it.
    """

    def __init__(
        self, clients: dist.ProcessGroup, shards: Shards | None, device: torch.device
    ) -> None:
        self._group = clients
        self.num_processes, self.process_index = self._group.size(), self._group.rank()
        self.device = device
        self._check(shards)

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        """Return the sum or the mean of a tensor over clients, as `Accelerator.reduce` does."""
        dist.all_reduce(tensor, group=self._group)
        return tensor / self.num_processes if reduction == "mean" else tensor

    def _check(self, shards: Shards | None) -> None:
        own_devices = {dist.get_rank()}
        fingerprint = [0, 1, 0]  # of a client of one device: its place, and how many there are
        if shards is not None:
            own_devices = set(dist.get_process_group_ranks(shards.group))
            fingerprint = shards.fingerprint()
        across = set(dist.get_process_group_ranks(self._group))
        fingerprint_tensor = torch.tensor(fingerprint, device=self.device)
        fingerprints = [torch.empty_like(fingerprint_tensor) for _ in range(self.num_processes)]
        dist.all_gather(fingerprints, fingerprint_tensor, group=self._group)
        is_wrong = len(own_devices & across) != 1 or not all(
            map(fingerprint_tensor.equal, fingerprints)
        )
        if shards is not None:
            sizes = shards.gathered(torch.tensor(self.num_processes))
            is_wrong = shards.any(is_wrong) or len(set(sizes)) > 1
        if is_wrong:
            raise ValueError(
                "clients= has to hold one device of each client, in each the one that has the "
                "same shards. Make a mesh, init_device_mesh(kind, (clients, shards), "
                "mesh_dim_names=('clients', 'shards')); call fully_shard(model, "
                "mesh=mesh['shards']), and pass clients=mesh['clients']."
            )
