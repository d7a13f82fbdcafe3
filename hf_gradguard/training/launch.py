"""How many ranks there are, and what to say where those are fewer than somebody meant."""

from __future__ import annotations

import os
from collections.abc import Mapping

from transformers.utils import logging

logger = logging.get_logger(__name__)

_COUNTS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


def ranks_asked_for(environment: Mapping[str, str]) -> int | None:
    """How many ranks a launcher was asked for; `None` if it was for several and does not say.

    Example:
        >>> ranks_asked_for({"SLURM_NTASKS": "4"}), ranks_asked_for({})
        (4, 1)
    """
    counts = [int(environment[n]) for n in _COUNTS if environment.get(n, "").isdigit()]
    if counts:
        return max(counts)
    # What `accelerate launch --cpu --num_processes 2` sets, and then starts one process.
    alone = "ACCELERATE_MIXED_PRECISION" in environment and "RANK" not in environment
    return None if alone and "MASTER_ADDR" in environment else 1


def say_ranks(ranks: int, environment: Mapping[str, str] = os.environ) -> None:
    """Warn, once, of fewer ranks than were asked for, and of one that is alone.

    Example:
        >>> say_ranks(2)
    """
    asked = ranks_asked_for(environment)
    if asked is None or asked > ranks:
        logger.warning_once(
            f"{asked or 'Several'} processes were asked for, but {ranks} {_ARE[ranks == 1]} there: "
            "clients are fewer than was meant. Accelerate starts one process on a CPU whatever "
            "--num_processes says: use `torchrun --nproc_per_node 2`, or `accelerate launch "
            "--multi_gpu --num_processes 2 --mixed_precision no --dynamo_backend no` with "
            "use_cpu=True."
        )
    elif ranks == 1:
        logger.warning_once(ALONE)


_ARE = ("are", "is")
ALONE = (
    "There is one process, so nothing leaves it: the defense changes what is trained on, and "
    "protects nobody from anybody. Clients are apart only on ranks of their own."
)
