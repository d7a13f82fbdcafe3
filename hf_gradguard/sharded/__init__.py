"""Clients of several devices, over which `torch.distributed.fsdp.fully_shard` has cut their model.

Each device holds a shard of every parameter's rows, and the same shard of the client's gradient.
What a defense does to single entries, each device does to its own. What it asks of a whole gradient
(norms, ranges, ranks, whether all entries are finite) is computed over the client's devices, by
`Shards`, which a map has as `gmap.shards`. A client of one device has none.

`protect` imports this room when it meets a sharded model, and a Trainer does if it is to shard one.
"""

from .clients import ClientRanks as ClientRanks
from .shards import Shards as Shards
