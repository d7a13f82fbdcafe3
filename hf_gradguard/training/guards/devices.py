"""What a Trainer's clients of several devices cannot have, each with its reason and the way out.

A client of one device never asks.
"""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainingArguments

from ...defenses import Defense
from ..config import setting

SIZES = (
    "FSDP without the size of a client: Accelerate would shard over all ranks, or average true "
    "gradients over clients. Pass parallelism_config=ParallelismConfig(dp_replicate_size=clients, "
    "dp_shard_size=devices of each), of accelerate, with at least two of both; use DDP if each "
    "device is a client, with LoRA or activation checkpointing if the model does not fit."
)
_UNSHARDED = (
    "dp_shard_size without FSDP: nothing would be sharded, and each device would be a client. Set "
    "fsdp=True as well, or leave parallelism_config out."
)


def sizes_of(args: TrainingArguments) -> tuple[int, int]:
    """How many clients there are, and how many devices each has: as arguments say, or Accelerate's
    launcher.

    Example:
        >>> sizes_of(TrainingArguments("out"))
        (1, 1)
    """
    sizes = getattr(args, "parallelism_config", None)
    if sizes is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "") == "true":
        from accelerate import ParallelismConfig

        sizes = ParallelismConfig()
    return (1, 1) if sizes is None else (sizes.dp_replicate_size, sizes.dp_shard_size)


def reason_of_arguments(args: TrainingArguments) -> str:
    """Why arguments cannot be had with FSDP, or ask for half of it; nothing if they can.

    Example:
        >>> from accelerate import ParallelismConfig
        >>> reason_of_arguments(TrainingArguments("out"))
        ''
        >>> reason_of_arguments(TrainingArguments("out", fsdp=True))
        'FSDP without the size of a client: ...'
    """
    clients, devices = sizes_of(args)
    if not args.fsdp:
        return _UNSHARDED if devices > 1 else ""
    if min(clients, devices) < 2:
        return SIZES
    engine: dict[str, Any] | None = getattr(args, "fsdp_plugin_args", None)
    if engine is None:
        return "FSDP with this version of Transformers. Take 5.23 or later, or DDP."
    return _of_engine(args, engine) or _of_settings(args)


def _of_engine(args: TrainingArguments, engine: dict[str, Any]) -> str:
    if engine.get("fsdp_version") != 2:
        return (
            "the first FSDP, which keeps no parameter by itself: nothing can be protected by name. "
            "Leave 'version' out of fsdp_config."
        )
    if engine.get("state_dict_type", "FULL_STATE_DICT") != "FULL_STATE_DICT":
        return (
            "checkpoints in shards (state_dict_type): whether they are complete cannot be told. "
            "Take 'FULL_STATE_DICT', the Trainer's default."
        )
    if engine.get("cpu_ram_efficient_loading"):
        return (
            "cpu_ram_efficient_loading: rank 0 would load the model for all, so that no client "
            "could compare what it received with what it loaded. Leave it out of fsdp_config."
        )
    if engine.get("cpu_offload"):
        return (
            "FSDP with cpu_offload: gradients would be exchanged from where they are not. Leave it "
            "out of fsdp_config; take more devices a client."
        )
    if engine.get("activation_checkpointing"):
        return (
            "activation_checkpointing in fsdp_config: it renames parameters. Set "
            "activation_checkpointing=True in the arguments."
        )
    if args.save_only_model and args.load_best_model_at_end:
        return "FSDP with save_only_model and load_best_model_at_end: leave one of them out."
    if args.auto_find_batch_size:
        return "FSDP with auto_find_batch_size: devices would not find the same. Set a batch size."
    if args.torch_compile:
        return (
            "torch.compile with FSDP: compiled code does not run the hooks by which a client's "
            "devices gather and scatter. Leave torch_compile off."
        )
    if args.fp16:
        return "fp16 with FSDP: devices would scale their parts apart. Use bf16=True."
    return ""


def _of_settings(args: TrainingArguments) -> str:
    """Of `GradGuardConfig`."""
    one_client = "clients of several devices: a process holds a part of one client. Leave it out."
    if setting(args, "num_clients") is not None:
        return f"num_clients with {one_client}"
    if setting(args, "clients_per_process") > 1:
        return f"clients_per_process with {one_client}"
    if setting(args, "secure_aggregation"):
        return (
            "secure_aggregation with clients of several devices: it masks what processes hold, not "
            "what clients do. Give each client one device."
        )
    if setting(args, "protect_labels") is not None:
        return (
            "protect_labels with clients of several devices: each would draw a row's label anew, "
            "so that ε would be larger than stated. Randomize labels before, or give each client "
            "one device."
        )
    if setting(args, "batch_statistics") == "shared":
        return (
            "batch_statistics='shared' with clients of several devices: they are of one device's "
            "rows. Take 'frozen'."
        )
    if setting(args, "leakage_logging_steps") or setting(args, "leakage_limit") is not None:
        return (
            "leakage_logging_steps or leakage_limit with clients of several devices: no device "
            "holds the whole map that they are computed from. Audit a smaller model of the kind."
        )
    return ""


def reason_of_defense(defense: Defense) -> str:
    """Why a defense does not protect a sharded model; nothing if it does.

    Example:
        >>> reason_of_defense(make_defense("gaussian_noise"))
        ''
        >>> reason_of_defense(make_defense("refiner"))
        'Refiner (refiner) does not protect a sharded model: ...'
    """
    if not (reason := defense.facts.sharded_refusal):
        return ""
    return f"{type(defense).__name__} ({defense.name}) does not protect a sharded model: {reason}"
