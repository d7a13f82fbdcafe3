"""Which of torch's operations exchange: all that torch has, by what it says of their arguments."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from hf_gradguard.gradient_map.exchanges import _NoExchange, exchanges

for _module in ("_functional_collectives", "tensor", "_symmetric_memory"):
    importlib.import_module(f"torch.distributed.{_module}")  # which register operations
ROOMS = {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}
BARRIERS = {"barrier", "monitored_barrier_", "_barrier"}


def operations() -> list[tuple[str, str]]:
    """The namespace and name of all that is registered."""
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    return [(room, name) for room, _, name in (full.partition("::") for full in sorted(names))]


def overload(room: str, name: str) -> Any:
    packet = getattr(getattr(torch.ops, room), name)
    return getattr(packet, packet.overloads()[0])


SENDING = [pair for pair in operations() if pair[0] in ROOMS and pair[1] not in BARRIERS]


def test_what_torch_has_is_looked_at() -> None:
    """At least these, of every room that this torch has."""
    least = {("c10d", "allreduce_"), ("c10d", "send"), ("_c10d_functional", "all_reduce"),
             ("_c10d_functional_autograd", "all_to_all_single")}  # fmt: skip
    assert least <= set(SENDING)


@pytest.mark.parametrize(("room", "name"), [*SENDING, ("_dtensor", "shard_dim_alltoall")])
def test_collectives_are_refused(room: str, name: str) -> None:
    if not hasattr(getattr(torch.ops, room), name):
        pytest.skip("this torch has no such operation")
    operation = overload(room, name)
    assert exchanges(operation)
    with pytest.raises(NotImplementedError, match=f"calls {room}.{name.split('.')[0]} in its pass"):
        _NoExchange(nn.Linear(2, 1)).__torch_dispatch__(operation, (), ())


@pytest.mark.parametrize(
    ("room", "name"),
    [("aten", "mm"), ("aten", "native_group_norm"), ("aten", "embedding"), ("c10d", "barrier"),
     ("c10d", "monitored_barrier_"), ("_dtensor", "mesh_get_process_group")],
)  # fmt: skip
def test_what_sends_nothing_passes(room: str, name: str) -> None:
    if not hasattr(getattr(torch.ops, room), name):
        pytest.skip("this torch has no such operation")
    assert not exchanges(overload(room, name))


def test_whatever_takes_a_group_of_ranks_is_refused() -> None:
    """Also in a namespace that a newer torch or another library brings."""
    library = torch.library.Library("hf_gradguard_test", "DEF")
    library.define("newer(Tensor x, str group_name) -> Tensor")
    library.define("local(Tensor x) -> Tensor")
    assert exchanges(torch.ops.hf_gradguard_test.newer.default)
    assert not exchanges(torch.ops.hf_gradguard_test.local.default)
    assert not exchanges(torch.ops.higher_order.cond)
