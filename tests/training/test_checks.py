"""What cannot be protected is refused, with the reason and the way out; what can be is let
through.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import datasets
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
)
from helpers import CHECKPOINTING, make_task
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset
from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy
from transformers.training_args import OptimizerNames

from hf_gradguard import GradGuardConfig, GradGuardTrainer, make_defense
from hf_gradguard.leakage import FisherAccountant
from hf_gradguard.training.guards.checks import (
    check_accelerator,
    check_arguments,
    check_model,
)
from hf_gradguard.training.guards.devices import sizes_of
from hf_gradguard.training.guards.leakage import check_leakage


@pytest.fixture(autouse=True)
def _restored_environment() -> Iterator[None]:
    """Some training arguments set environment variables that later accelerators read."""
    with mock.patch.dict(os.environ):
        yield


def refused(check: Any, *arguments: Any) -> str:
    with pytest.raises(NotImplementedError, match="GradGuardTrainer does not support ") as refusal:
        check(*arguments)
    return str(refusal.value)


# Training arguments. What needs a package or device that is not there is set on a real object
# afterwards.

ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "deepspeed": (
        {},
        {"deepspeed": "zero.json"},
        ("DeepSpeed", "owns the backward pass", "Use DDP"),
    ),
    "fsdp": ({}, {"fsdp": True}, ("FSDP", "over all ranks", "dp_replicate_size", "use DDP")),
    "lomo": ({"optim": "lomo"}, {}, ("LOMO", "inside the backward pass", "optim='adamw_torch'")),
    "adalomo": (
        {"optim": "adalomo"},
        {},
        ("LOMO", "inside the backward pass", "optim='adamw_torch'"),
    ),
    "static graph": (
        {"ddp_static_graph": True},
        {},
        ("static DDP graph", "there is none", "ddp_static_graph unset"),
    ),
    "reentrant": (
        {
            CHECKPOINTING: True,
            f"{CHECKPOINTING}_kwargs": {"use_reentrant": True},
        },
        {},
        ("reentrant activation checkpointing", "torch.autograd.grad", "{'use_reentrant': False}"),
    ),
    "reentrant, old name": (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {},
        ("reentrant activation checkpointing", "torch.autograd.grad", "{'use_reentrant': False}"),
    ),
    "hub checkpoint": (
        {"push_to_hub": True, "hub_strategy": "checkpoint"},
        {},
        ("hub_strategy='checkpoint'", "private state", "Use 'end' or 'every_save'"),
    ),
    "hub all_checkpoints": (
        {"push_to_hub": True, "hub_strategy": "all_checkpoints"},
        {},
        ("hub_strategy='all_checkpoints'", "private state", "Use 'end' or 'every_save'"),
    ),
    "hub, of a newer version": (
        {"push_to_hub": True},
        {"hub_strategy": "every_step"},
        ("hub_strategy='every_step'", "private state"),
    ),
    "offloaded activations": (
        {},
        {"activation_offloading": True},
        ("activation_offloading", "does not run", "Use activation checkpointing"),
    ),
    "several gpus": (
        {},
        {"_n_gpu": 2},
        ("DataParallel (2 GPUs in one process)", "summed before", "CUDA_VISIBLE_DEVICES=0"),
    ),
}


SIZES = SimpleNamespace(dp_replicate_size=2, dp_shard_size=2)
OF_DEVICES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "offloaded": ({"cpu_offload": True}, {}, ("cpu_offload", "Leave it out")),
    "loaded by one": (
        {"cpu_ram_efficient_loading": True},
        {},
        ("rank 0 would load the model for all", "Leave it out"),
    ),
    "engine's checkpointing": (
        {"activation_checkpointing": True},
        {},
        ("renames parameters", "activation_checkpointing=True in the arguments"),
    ),
    "best of weights alone": (
        {},
        {"save_only_model": True, "load_best_model_at_end": True},
        ("leave one of them out",),
    ),
    "batch size": ({}, {"auto_find_batch_size": True}, ("Set a batch size",)),
    "scaled": ({}, {"fp16": True}, ("fp16 with FSDP", "Use bf16=True")),
    "masked": ({}, {"secure_aggregation": True}, ("masks what processes hold", "one device")),
    "statistics": ({}, {"batch_statistics": "shared"}, ("one device's rows", "Take 'frozen'")),
    "limited": ({}, {"leakage_limit": 0.1}, ("leakage_limit", "Audit a smaller model")),
}
"""Beside what four ranks refuse in `tests/distributed/test_shards.py`: of FSDP's engine, and of
arguments.
"""


@pytest.mark.parametrize(("engine", "later", "says"), OF_DEVICES.values(), ids=OF_DEVICES.keys())
def test_refused_arguments_of_sharded_clients(
    engine: dict[str, Any], later: dict[str, Any], says: tuple[str, ...]
) -> None:
    plugin = {"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT"}
    sharded = {"fsdp": True, "parallelism_config": SIZES, "fsdp_plugin_args": plugin}
    check_arguments(make_arguments({}, sharded))
    refusal = make_arguments({}, {**sharded, "fsdp_plugin_args": {**plugin, **engine}, **later})
    message = refused(check_arguments, refusal)
    assert all(part in message for part in says), message


IN_BACKWARD = {"lomo", "adalomo", "galore_adamw_layerwise", "galore_adamw_8bit_layerwise",
               "galore_adafactor_layerwise", "apollo_adamw_layerwise"}  # fmt: skip


@pytest.mark.parametrize("name", [kind.value for kind in OptimizerNames])
def test_optimizers_that_step_in_the_backward_pass_are_refused(name: str) -> None:
    args = TrainingArguments("out", use_cpu=True)
    args.optim = name  # what needs a package is refused by Transformers itself
    if name in IN_BACKWARD:
        assert "inside the backward pass" in refused(check_arguments, args)
    else:
        check_arguments(args)


@pytest.mark.parametrize("strategy", [kind.value for kind in HubStrategy])
def test_checkpoints_are_not_pushed(strategy: str) -> None:
    args = TrainingArguments("out", use_cpu=True, push_to_hub=True, hub_strategy=strategy)
    if strategy in ("end", "every_save"):
        check_arguments(args)
    else:
        assert f"hub_strategy='{strategy}'" in refused(check_arguments, args)


@pytest.mark.parametrize("ranks", [1, 2])
def test_log_probabilities_of_a_reference_stay_on_their_rank(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL gathers them of all ranks' texts before training begins."""
    monkeypatch.setattr(TrainingArguments, "world_size", ranks)
    args = TrainingArguments("out", use_cpu=True)
    args.precompute_ref_log_probs = True  # type: ignore[attr-defined]
    if ranks > 1:
        said = refused(check_arguments, args)
        assert "would be sent the reference's log-probabilities" in said
    else:
        check_arguments(args)


WHOLE_REPLICAS = {"NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU"}


@pytest.mark.parametrize("kind", list(DistributedType))
def test_whole_replicas_alone_are_supported(kind: DistributedType) -> None:
    accelerator = make_accelerator(distributed_type=kind)
    if kind.value in WHOLE_REPLICAS:
        check_accelerator(accelerator)
    else:
        refused(check_accelerator, accelerator)


def test_launcher_s_sizes_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "3")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    assert sizes_of(make_arguments({}, {})) == (1, 1)
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    assert sizes_of(make_arguments({}, {})) == (3, 2)


def make_arguments(
    settings: dict[str, Any], later: dict[str, Any], kind: type = GradGuardConfig
) -> TrainingArguments:
    args = kind(output_dir="out", use_cpu=True, report_to="none", **settings)
    for name, value in later.items():
        setattr(args, name, value)
    return args


@pytest.mark.parametrize("kind", [GradGuardConfig, TrainingArguments])
@pytest.mark.parametrize(("settings", "later", "says"), ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_refused_arguments(
    settings: dict[str, Any], later: dict[str, Any], says: tuple[str, ...], kind: type
) -> None:
    message = refused(check_arguments, make_arguments(settings, later, kind))
    assert all(part in message for part in says), message


@pytest.mark.parametrize(
    ("settings", "later"), [v[:2] for v in ARGUMENTS.values()], ids=ARGUMENTS.keys()
)
def test_trainer_refuses_arguments_before_it_touches_anything(
    settings: dict[str, Any], later: dict[str, Any]
) -> None:
    model = mock.Mock(spec=nn.Module)
    with pytest.raises(NotImplementedError, match="GradGuardTrainer does not support"):
        GradGuardTrainer(model, make_arguments(settings, later), defense="none")
    assert not model.mock_calls


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bf16": True},
        {CHECKPOINTING: True},
        {
            CHECKPOINTING: True,
            f"{CHECKPOINTING}_kwargs": {"use_reentrant": False},
        },
        {"optim": "adafactor"},
        {"push_to_hub": True, "hub_strategy": "every_save"},
        {"ddp_find_unused_parameters": True},
        {"hub_strategy": "checkpoint"},  # nothing is pushed
    ],
    ids=str,
)
def test_supported_arguments(settings: dict[str, Any]) -> None:
    check_arguments(make_arguments(settings, {}))


# Models


def _distributed(module: nn.Module) -> nn.Module:
    wrapper = DistributedDataParallel.__new__(
        DistributedDataParallel
    )  # its constructor wants a process group
    nn.Module.__init__(wrapper)
    wrapper.module = module
    return wrapper


def _compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile()
    return module


def _with_compiled_part(module: nn.Module) -> nn.Module:
    module.classifier = torch.compile(module.classifier)
    return module


def _with(module: nn.Module, **attributes: Any) -> nn.Module:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def _partly_elsewhere(module: nn.Module) -> nn.Module:
    module.classifier.to("meta")
    return module


SHARDED = (
    "sharded at load time",
    "no rank holds a whole local gradient",
    "Load the whole model on every rank",
)
SPREAD = ("spread over several devices", "without device_map='auto'")
COMPILED = ("torch.compile", "second derivatives", "pass the model as it was before compiling")
MODELS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "data parallel": (nn.DataParallel, ("wrapped in DataParallel", "Pass the module inside it")),
    "distributed": (
        _distributed,
        ("wrapped in DistributedDataParallel", "Pass the module inside it"),
    ),
    "compiled": (torch.compile, COMPILED),
    "compiled in place": (_compiled_in_place, COMPILED),
    "partly compiled": (_with_compiled_part, COMPILED),
    "sharded": (
        lambda module: _with(nn.Sequential(module), is_distributed_loading_by_transformers=True),
        SHARDED,
    ),
    "two devices": (_partly_elsewhere, SPREAD),
    "device map": (
        lambda module: _with(module, hf_device_map={"bert": 0, "classifier": 1}),
        SPREAD,
    ),
}


@pytest.mark.parametrize(("change", "says"), MODELS.values(), ids=MODELS.keys())
def test_refused_models(change: Any, says: tuple[str, ...]) -> None:
    message = refused(check_model, change(make_task("bert")[0]))
    assert all(part in message for part in says), message


def test_model_of_distributed_tensors_is_refused() -> None:
    # A real DTensor needs a process group, which would stay behind in this process.
    with mock.patch("torch.distributed.tensor.DTensor", nn.Parameter):
        message = refused(check_model, make_task("bert")[0])
    assert all(part in message for part in SHARDED)


@pytest.mark.parametrize("name", ["bert", "bert_lora", "gpt2_lm", "vit", "t5"])
def test_supported_models(name: str) -> None:
    check_model(_with(make_task(name)[0], hf_device_map={"": "cpu"}))


def test_trainer_refuses_a_compiled_model(tmp_path: Path) -> None:
    model = _compiled_in_place(make_task("bert")[0])
    with pytest.raises(NotImplementedError, match=r"torch\.compile"):
        GradGuardTrainer(model, make_arguments({}, {}), defense="none")


# Distributed set-ups. One process on a CPU has none of them, so the object is a stand-in with a
# real one's values.


def make_accelerator(**changes: Any) -> Any:
    real = Accelerator(cpu=True)
    values = {
        name: getattr(real, name, None)
        for name in (
            "distributed_type",
            "mixed_precision",
            "parallelism_config",
            "ddp_handler",
            "num_processes",
        )
    }
    state = SimpleNamespace(
        dynamo_plugin=SimpleNamespace(backend=changes.pop("dynamo", DynamoBackend.NO))
    )
    loading = SimpleNamespace(dispatch_batches=changes.pop("dispatch_batches", None))
    return SimpleNamespace(**{**values, "state": state, "dataloader_config": loading, **changes})


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def _parallel(**sizes: int) -> SimpleNamespace:
    return SimpleNamespace(**{"tp_size": 1, "cp_size": 1, "sp_size": 1, **sizes})


REPLICAS = ("only whole replicas", "Use DDP")
PARALLEL = ("tensor, context or sequence parallelism", "Use DDP alone")
DISPATCHED = (
    "dispatched batches",
    "send it, unprotected",
    "accelerator_config={'dispatch_batches': False}",
)
ACCELERATORS: dict[str, tuple[dict[str, Any], Any, tuple[str, ...]]] = {
    "deepspeed": ({"distributed_type": DistributedType.DEEPSPEED}, None, ("DeepSpeed", "Use DDP")),
    "fsdp": ({"distributed_type": DistributedType.FSDP}, None, ("FSDP", "use DDP")),
    "megatron": (
        {"distributed_type": DistributedType.MEGATRON_LM},
        None,
        ("MEGATRON_LM", *REPLICAS),
    ),
    "xla": ({"distributed_type": DistributedType.XLA}, None, ("XLA", *REPLICAS)),
    "hpu": ({"distributed_type": DistributedType.MULTI_HPU}, None, ("MULTI_HPU", *REPLICAS)),
    "fp16": ({"mixed_precision": "fp16"}, None, ("fp16", "Use bf16=True")),
    "fp8": ({"mixed_precision": "fp8"}, None, ("fp8", "Use bf16=True")),
    "dynamo": (
        {"dynamo": DynamoBackend.INDUCTOR},
        None,
        ("torch.compile", "hooks", "second derivatives", "torch_compile=True"),
    ),
    "tensor parallel": ({"parallelism_config": _parallel(tp_size=2)}, None, PARALLEL),
    "context parallel": ({"parallelism_config": _parallel(cp_size=2)}, None, PARALLEL),
    "sequence parallel": ({"parallelism_config": _parallel(sp_size=2)}, None, PARALLEL),
    "static graph": (
        {"ddp_handler": DistributedDataParallelKwargs(static_graph=True)},
        None,
        ("static DDP graph", "ddp_static_graph"),
    ),
    "communication hook": (
        {"ddp_handler": DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)},
        None,
        ("communication hooks", "comm_hook unset"),
    ),
    "dispatching": ({"num_processes": 2, "dispatch_batches": True}, [1], DISPATCHED),
    "iterable": ({"num_processes": 2}, Endless(), DISPATCHED),
    "iterable of datasets": (
        {"num_processes": 2},
        datasets.Dataset.from_dict({"a": [1]}).to_iterable_dataset(),
        DISPATCHED,
    ),
}


@pytest.mark.parametrize(
    ("changes", "data", "says"), ACCELERATORS.values(), ids=ACCELERATORS.keys()
)
def test_refused_set_ups(changes: dict[str, Any], data: Any, says: tuple[str, ...]) -> None:
    message = refused(check_accelerator, make_accelerator(**changes), data)
    assert all(part in message for part in says), message


@pytest.mark.parametrize(
    ("changes", "data"),
    [
        ({}, Endless()),  # one process reads for itself
        ({"num_processes": 2, "distributed_type": DistributedType.MULTI_CPU}, [1]),
        (
            {
                "num_processes": 2,
                "distributed_type": DistributedType.MULTI_GPU,
                "mixed_precision": "bf16",
            },
            [1],
        ),
        ({"num_processes": 2, "dispatch_batches": False}, Endless()),
        ({"num_processes": 2}, None),
        ({"ddp_handler": DistributedDataParallelKwargs(find_unused_parameters=True)}, [1]),
        ({"parallelism_config": _parallel()}, [1]),
    ],
)
def test_supported_set_ups(changes: dict[str, Any], data: Any) -> None:
    check_accelerator(make_accelerator(**changes), data)


def test_real_accelerator_is_supported() -> None:
    check_accelerator(Accelerator(cpu=True), [1])


@pytest.mark.parametrize("name", ["gaussian_noise", "optimal_noise", "pruning", "quantization"])
def test_ligers_kernels_are_for_what_differentiates_once(name: str) -> None:
    """Alone, and neither measured, bounded nor accounted."""
    liger, defense = {"use_liger_kernel": True}, make_defense(name)
    args = make_arguments(liger, {})
    check_arguments(args)
    check_leakage(args, defense, None, own_batches=False)
    logged = make_arguments(liger | {"leakage_logging_steps": 5}, {})
    limited = make_arguments(liger | {"leakage_limit": 0.1}, {})
    for asked, accountant in ((logged, None), (limited, None), (args, FisherAccountant())):
        with pytest.raises(NotImplementedError, match="Liger") as refusal:
            check_leakage(asked, defense, accountant, own_batches=False)
        for part in ("in the forward pass", "silently wrong", "use_liger_kernel=False"):
            assert part in str(refusal.value)


def test_ligers_kernels_are_refused_with_what_differentiates_twice() -> None:
    args = make_arguments({"use_liger_kernel": True}, {})
    defense = make_defense("refiner", objective="weighted")
    assert defense.facts.needs_second_order
    with pytest.raises(NotImplementedError, match=r"Liger kernels.*refiner may not"):
        check_leakage(args, defense, None, own_batches=False)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_that_a_model_brings_is_looked_at(reentrant: bool) -> None:
    """Without a word in the training arguments."""
    model = make_task("bert")[0]
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        with pytest.raises(NotImplementedError, match="reentrant activation checkpointing"):
            check_model(model)
        model.gradient_checkpointing_disable()
    check_model(model)
