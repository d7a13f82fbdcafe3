"""Clients of one device, and what is refused before any rank is asked. Several devices:
`tests/distributed/test_mesh.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import make_task
from torch import nn

from hf_gradguard import GradientMap, protect
from hf_gradguard.defenses import DEFENSES, chain, make_defense
from hf_gradguard.federation import UpdateMap
from hf_gradguard.gradient_map.parameters import is_sharded
from hf_gradguard.sharded.shards import local, whole_of


class FullyShardedDataParallel(nn.Module):
    """Of the first FSDP's name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_a_whole_model_is_one_device_s() -> None:
    model = make_task("bert")[0]
    assert not is_sharded(model)
    tensor = torch.ones(2, requires_grad=True)
    assert local(tensor).data_ptr() == tensor.data_ptr()
    assert whole_of(tensor, tensor) is tensor


def test_the_first_fsdp_is_refused() -> None:
    model, batch = make_task("bert")
    with pytest.raises(NotImplementedError, match=r"Use torch.distributed.fsdp.fully_shard"):
        protect(FullyShardedDataParallel(model), batch, "none")


@pytest.mark.parametrize("make", [GradientMap, lambda m, b: UpdateMap(m, [b], learning_rate=0.1)])
def test_a_sharded_model_has_no_map(make: Any) -> None:
    model, batch = make_task("bert")
    with pytest.raises(NotImplementedError, match="sharded model"):
        make(FullyShardedDataParallel(model), batch)


NEED_ALL = {"soteria", "gradient_sketch", "refiner", "refiner_published"}


@pytest.mark.parametrize("name", sorted(DEFENSES))
def test_which_defenses_work_shard_by_shard(name: str) -> None:
    defense = make_defense(name)
    chained = [] if defense.facts.replaces_gradient else [chain(make_defense("pruning"), defense)]
    for one in (defense, *chained):
        if name in NEED_ALL:
            assert "give each rank the whole model" in (one.facts.sharded_refusal or "")
        else:
            assert one.facts.sharded_refusal is None
