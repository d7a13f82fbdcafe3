"""A client on several devices: `torch.distributed.fsdp.fully_shard` has cut its model over them.

Each device holds a part of every parameter, a shard of its rows, and the same part of the client's
gradient. What a defense does to entries, each device does to its own. What it asks of a whole
gradient (norms, ranges, ranks, whether all is finite) is taken over the client's devices: that is
`Shards`, which a map has as `gmap.shards`. A client of one device has none.

`protect` imports this room when it meets a sharded model, and a Trainer where it is to shard one.
"""

from .clients import ClientRanks as ClientRanks
from .shards import Shards as Shards
