"""What cannot be protected is refused, with the reason and the way out; what can be is let
through. `CASES` has one of every rule at least.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
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
from helpers import CHECKPOINTING, make_task, refuses
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import HubStrategy
from transformers.training_args import OptimizerNames

from hf_gradguard import GradGuardConfig, GradGuardMixin, GradGuardTrainer, make_defense, protect
from hf_gradguard.defenses import Chain
from hf_gradguard.leakage import FisherAccountant
from hf_gradguard.training.accelerator import GuardedAccelerator
from hf_gradguard.training.clients.batches import CLIENT, SHARE, WholeCollator
from hf_gradguard.training.exchange.gradients import Ledger
from hf_gradguard.training.exchange.secure import share_of_noise
from hf_gradguard.training.guards.hooks import (
    Differentiation,
    check_free_of_hooks,
    check_hooks,
    hooks_of,
    hooks_of_accumulation,
    run_hooks_on_sums,
)
from hf_gradguard.training.message import KeptState, LossWeights, Normalization, clients_in
from hf_gradguard.training.privacy.correlated_rows import check_is_linear
from hf_gradguard.training.privacy.coupling import CouplingCheck
from hf_gradguard.training.privacy.failing_rows import RowTrial
from hf_gradguard.training.privacy.labels import LabelKey, protect_labels
from hf_gradguard.training.refusals import (
    RULES,
    Measured,
    UnsupportedError,
    check_accelerator,
    check_arguments,
    check_collator,
    check_drawing,
    check_leakage,
    check_loss,
    check_model,
    check_trackers,
    refusal,
    sizes_of,
)


@pytest.fixture(autouse=True)
def _restored_environment() -> Iterator[None]:
    """Some training arguments set environment variables that later accelerators read."""
    with mock.patch.dict(os.environ):
        yield


CASES: dict[str, list[Callable[[], object]]] = {}
"""By a rule's name: what it refuses."""


def case(rule: str, *names: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function as one that these rules refuse."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        for name in (rule, *names):
            CASES.setdefault(name, []).append(function)
        return function

    return register


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_refuses_its_cases(rule: Any) -> None:
    assert rule.name in CASES, "a rule needs a case here"
    for run in CASES[rule.name]:
        with pytest.raises(UnsupportedError) as refused:
            run()
        assert refused.value.rule == rule.name
        said = str(refused.value)
        assert said.startswith(rule.opening)
        assert said.endswith(f" [{rule.name}]")
        assert "{" not in said.replace("={'", "").replace("={False", "")
        assert str(pickle.loads(pickle.dumps(refused.value))) == said


def test_every_case_has_a_rule() -> None:
    names = [rule.name for rule in RULES]
    assert sorted(names) == sorted(set(names))
    assert set(CASES) == set(names)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_has_a_reason_and_a_way_out(rule: Any) -> None:
    assert rule.name == rule.name.lower().replace(" ", "-").replace("_", "-")
    assert rule.reason
    assert rule.way_out.endswith((".", "}"))


# Training arguments. What needs a package or device that is not there is set on a real object
# afterwards.

REENTRANT = {"use_reentrant": True}
ARGUMENTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("deepspeed", {}, {"deepspeed": "zero.json"}),
    ("fsdp-sizes", {}, {"fsdp": True}),
    (
        "shard-size-without-fsdp",
        {},
        {"parallelism_config": SimpleNamespace(dp_replicate_size=1, dp_shard_size=2)},
    ),
    ("lomo", {"optim": "lomo"}, {}),
    ("lomo", {"optim": "adalomo"}, {}),
    ("layerwise-optimizer", {}, {"optim": "galore_adamw_layerwise"}),
    ("static-graph", {"ddp_static_graph": True}, {}),
    (
        "reentrant-checkpointing",
        {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": REENTRANT},
        {},
    ),
    (
        "reentrant-checkpointing",
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": REENTRANT},
        {},
    ),
    ("pushed-checkpoints", {"push_to_hub": True, "hub_strategy": "checkpoint"}, {}),
    ("pushed-checkpoints", {"push_to_hub": True, "hub_strategy": "all_checkpoints"}, {}),
    ("pushed-checkpoints", {"push_to_hub": True}, {"hub_strategy": "every_step"}),  # a newer one
    ("activation-offloading", {}, {"activation_offloading": True}),
    ("data-parallel", {}, {"_n_gpu": 2}),
]
SIZES = SimpleNamespace(dp_replicate_size=2, dp_shard_size=2)
PLUGIN = {"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT"}
SHARDED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("fsdp-version", {"fsdp_version": 1}, {}),
    ("fsdp-state-dict", {"state_dict_type": "SHARDED_STATE_DICT"}, {}),
    ("fsdp-cpu-offload", {"cpu_offload": True}, {}),
    ("fsdp-cpu-ram-efficient-loading", {"cpu_ram_efficient_loading": True}, {}),
    ("fsdp-activation-checkpointing", {"activation_checkpointing": True}, {}),
    ("fsdp-best-model", {}, {"save_only_model": True, "load_best_model_at_end": True}),
    ("fsdp-auto-batch-size", {}, {"auto_find_batch_size": True}),
    ("fsdp-compile", {}, {"torch_compile": True}),
    ("fsdp-fp16", {}, {"fp16": True}),
    ("fsdp-clients", {}, {"clients_per_process": 2}),
    ("fsdp-clients", {}, {"num_clients": 4}),
    ("fsdp-secure-aggregation", {}, {"secure_aggregation": True}),
    ("fsdp-protect-labels", {}, {"protect_labels": "randomized_response"}),
    ("fsdp-batch-statistics", {}, {"batch_statistics": "shared"}),
    ("fsdp-leakage", {}, {"leakage_limit": 0.1}),
    ("fsdp-leakage", {}, {"leakage_logging_steps": 1}),
]
"""Of clients with several devices: what their engine is told, and other arguments."""


def make_arguments(
    settings: dict[str, Any], later: dict[str, Any], kind: type = GradGuardConfig
) -> TrainingArguments:
    args = kind(output_dir="out", use_cpu=True, report_to="none", **settings)
    for name, value in later.items():
        setattr(args, name, value)
    return args


def sharded_arguments(engine: dict[str, Any], later: dict[str, Any]) -> TrainingArguments:
    sharded = {"fsdp": True, "parallelism_config": SIZES, "fsdp_plugin_args": {**PLUGIN, **engine}}
    return make_arguments({}, {**sharded, **later})


for _name, _settings, _later in ARGUMENTS:
    for _kind in (GradGuardConfig, TrainingArguments):
        case(_name)(lambda s=_settings, v=_later, k=_kind: check_arguments(make_arguments(s, v, k)))
for _name, _settings, _later in SHARDED:
    case(_name)(lambda s=_settings, v=_later: check_arguments(sharded_arguments(s, v)))


@case("fsdp-transformers")
def _of_an_older_version() -> None:
    args = make_arguments({}, {"fsdp": True, "parallelism_config": SIZES})
    vars(args).pop("fsdp_plugin_args", None)
    args = mock.Mock(wraps=args, spec=[name for name in dir(args) if name != "fsdp_plugin_args"])
    args.fsdp, args.deepspeed, args.parallelism_config = True, None, SIZES
    check_arguments(args)


def test_sharded_arguments_are_supported() -> None:
    check_arguments(sharded_arguments({}, {}))


IN_BACKWARD = {"lomo", "adalomo", "galore_adamw_layerwise", "galore_adamw_8bit_layerwise",
               "galore_adafactor_layerwise", "apollo_adamw_layerwise"}  # fmt: skip


@pytest.mark.parametrize("name", [kind.value for kind in OptimizerNames])
def test_optimizers_that_step_in_the_backward_pass_are_refused(name: str) -> None:
    args = TrainingArguments("out", use_cpu=True)
    args.optim = name  # what needs a package is refused by Transformers itself
    if name in IN_BACKWARD:
        with refuses("lomo", "layerwise-optimizer"):
            check_arguments(args)
    else:
        check_arguments(args)


@pytest.mark.parametrize("strategy", [kind.value for kind in HubStrategy])
def test_checkpoints_are_not_pushed(strategy: str) -> None:
    args = TrainingArguments("out", use_cpu=True, push_to_hub=True, hub_strategy=strategy)
    if strategy in ("end", "every_save"):
        check_arguments(args)
    else:
        with refuses("pushed-checkpoints"):
            check_arguments(args)


def _with_reference(ranks: int) -> None:
    with mock.patch.object(TrainingArguments, "world_size", ranks):
        args = TrainingArguments("out", use_cpu=True)
        args.precompute_ref_log_probs = True  # type: ignore[attr-defined]
        check_arguments(args)


@case("reference-log-probs")
def _log_probabilities_of_a_reference() -> None:
    """TRL gathers them of all ranks' texts before training begins."""
    _with_reference(ranks=2)


def test_log_probabilities_of_a_reference_stay_on_one_rank() -> None:
    _with_reference(ranks=1)


WHOLE_REPLICAS = {"NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU"}


@pytest.mark.parametrize("kind", list(DistributedType))
def test_whole_replicas_alone_are_supported(kind: DistributedType) -> None:
    accelerator = make_accelerator(distributed_type=kind)
    if kind.value in WHOLE_REPLICAS:
        check_accelerator(accelerator)
    else:
        with refuses("deepspeed-engine", "fsdp-engine", "distributed-type"):
            check_accelerator(accelerator)


def test_launcher_s_sizes_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "3")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    assert sizes_of(make_arguments({}, {})) == (1, 1)
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    assert sizes_of(make_arguments({}, {})) == (3, 2)


@pytest.mark.parametrize(("rule", "settings", "later"), ARGUMENTS)
def test_trainer_refuses_arguments_before_it_touches_anything(
    rule: str, settings: dict[str, Any], later: dict[str, Any]
) -> None:
    model = mock.Mock(spec=nn.Module)
    with refuses(rule):
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


def _reentrant(module: Any) -> Any:
    module.gradient_checkpointing_enable(REENTRANT)
    return module


MODELS: list[tuple[str, Any]] = [
    ("wrapped-model", nn.DataParallel),
    ("wrapped-model", _distributed),
    ("compiled-model", torch.compile),
    ("compiled-model", _compiled_in_place),
    ("compiled-model", _with_compiled_part),
    ("reentrant-model", _reentrant),
    ("synchronized-batch-norm", lambda module: nn.Sequential(module, nn.SyncBatchNorm(2))),
    (
        "sharded-model",
        lambda module: _with(nn.Sequential(module), is_distributed_loading_by_transformers=True),
    ),
    ("model-on-several-devices", _partly_elsewhere),
    (
        "model-on-several-devices",
        lambda module: _with(module, hf_device_map={"bert": 0, "classifier": 1}),
    ),
]
for _name, _change in MODELS:
    case(_name)(lambda change=_change: check_model(change(make_task("bert")[0])))


def test_model_of_distributed_tensors_is_refused() -> None:
    # A real DTensor needs a process group, which would stay behind in this process.
    with mock.patch("torch.distributed.tensor.DTensor", nn.Parameter), refuses("sharded-model"):
        check_model(make_task("bert")[0])


@pytest.mark.parametrize("name", ["bert", "bert_lora", "gpt2_lm", "vit", "t5"])
def test_supported_models(name: str) -> None:
    check_model(_with(make_task(name)[0], hf_device_map={"": "cpu"}))


def test_trainer_refuses_a_compiled_model(tmp_path: Path) -> None:
    model = _compiled_in_place(make_task("bert")[0])
    with refuses("compiled-model"):
        GradGuardTrainer(model, make_arguments({}, {}), defense="none")


def test_checkpointing_that_a_model_brings_is_looked_at() -> None:
    """Without a word in the training arguments."""
    model = make_task("bert")[0]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check_model(model)
    _reentrant(model).gradient_checkpointing_disable()
    check_model(model)


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
    plugin = {"backend": changes.pop("dynamo", DynamoBackend.NO)}
    plugin["use_regional_compilation"] = changes.pop("regional", False)
    state = SimpleNamespace(dynamo_plugin=SimpleNamespace(**plugin))
    loading = SimpleNamespace(dispatch_batches=changes.pop("dispatch_batches", None))
    return SimpleNamespace(**{**values, "state": state, "dataloader_config": loading, **changes})


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def _parallel(**sizes: int) -> SimpleNamespace:
    return SimpleNamespace(**{"tp_size": 1, "cp_size": 1, "sp_size": 1, **sizes})


COMPILING = {"dynamo": DynamoBackend.INDUCTOR}
ACCELERATORS: list[tuple[str, dict[str, Any], Any, str | None]] = [
    ("deepspeed-engine", {"distributed_type": DistributedType.DEEPSPEED}, None, None),
    ("fsdp-engine", {"distributed_type": DistributedType.FSDP}, None, None),
    ("fsdp-engine", {"distributed_type": DistributedType.FSDP}, None, "pruning"),
    (
        "sharded-defense",
        {"distributed_type": DistributedType.FSDP, "shards_of": None},
        None,
        "refiner",
    ),
    ("distributed-type", {"distributed_type": DistributedType.MEGATRON_LM}, None, None),
    ("distributed-type", {"distributed_type": DistributedType.XLA}, None, None),
    ("distributed-type", {"distributed_type": DistributedType.MULTI_HPU}, None, None),
    ("fp16-loop", {"mixed_precision": "fp16"}, None, None),
    ("fp16-defense", {"mixed_precision": "fp16"}, None, "soteria"),
    ("fp8", {"mixed_precision": "fp8"}, None, None),
    ("compiled-loop", COMPILING, None, None),
    ("compiled-defense", COMPILING, None, "soteria"),
    ("regional-compilation", {**COMPILING, "regional": True}, None, "pruning"),
    ("parallelism", {"parallelism_config": _parallel(tp_size=2)}, None, None),
    ("parallelism", {"parallelism_config": _parallel(cp_size=2)}, None, None),
    ("parallelism", {"parallelism_config": _parallel(sp_size=2)}, None, None),
    (
        "static-graph-handler",
        {"ddp_handler": DistributedDataParallelKwargs(static_graph=True)},
        None,
        None,
    ),
    (
        "communication-hook",
        {"ddp_handler": DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)},
        None,
        None,
    ),
    ("dispatched-batches", {"num_processes": 2, "dispatch_batches": True}, [1], None),
    ("dispatched-batches", {"num_processes": 2}, Endless(), None),
    (
        "dispatched-batches",
        {"num_processes": 2},
        datasets.Dataset.from_dict({"a": [1]}).to_iterable_dataset(),
        None,
    ),
]
for _name, _changes, _data, _defense in ACCELERATORS:
    case(_name)(
        lambda changes=_changes, data=_data, defense=_defense: check_accelerator(
            make_accelerator(**changes), data, defense and make_defense(defense)
        )
    )


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


@pytest.mark.parametrize("changes", [COMPILING, {"mixed_precision": "fp16"}])
def test_a_trainer_compiles_and_unscales_by_itself(changes: dict[str, Any]) -> None:
    check_accelerator(make_accelerator(**changes), None, make_defense("gaussian_noise"))


def test_real_accelerator_is_supported() -> None:
    check_accelerator(Accelerator(cpu=True), [1])


# Leakage. An account of `OF_A_RATE` is of batches that are drawn at a rate.

OF_A_RATE = {"sampling_rate": 0.1, "noise_multiplier": 2.0, "delta": 1e-3}
LIMITED, MEASURED = {"leakage_limit": 0.1}, {"leakage_logging_steps": 5}
LIGER, FP16 = {"use_liger_kernel": True}, {"fp16": True}
TWICE: dict[str, Any] = {"defense": "refiner", "objective": "weighted"}
LEAKAGE: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # the rule, training arguments, the defense, and what else is asked
    ("liger-twice", LIGER, TWICE, {}),
    ("liger-twice", LIGER | MEASURED, {}, {}),
    ("liger-twice", LIGER | LIMITED, {}, {}),
    ("liger-twice", LIGER, {}, {"accountant": FisherAccountant()}),
    ("fp16-summed-noise", FP16 | {"noise_for": "sum"}, {}, {}),
    ("fp16-leakage", FP16 | MEASURED, {}, {}),
    ("leakage-of-unknown-noise", LIMITED, {"defense": "pruning"}, {}),
    ("leakage-of-unknown-noise", {}, {"defense": "pruning"}, {"accountant": FisherAccountant()}),
    ("account-of-shuffled-epochs", {}, {}, {"accountant": FisherAccountant(**OF_A_RATE)}),
    (
        "account-of-little-noise",
        {},
        {},
        {"accountant": FisherAccountant(**OF_A_RATE), "own_batches": True},
    ),
    (
        "account-of-unnumbered-rows",
        {},
        {},
        {"accountant": FisherAccountant(), "train_dataset": Endless()},
    ),
    ("fsdp-accountant", {"fsdp": True}, {}, {"accountant": FisherAccountant()}),
]


def leakage_checked(later: dict[str, Any], defense: dict[str, Any], asked: dict[str, Any]) -> None:
    named = {"defense": "gaussian_noise", "scale": 0.1} if not defense else dict(defense)
    made = make_defense(named.pop("defense"), **named)
    check_leakage(Measured(make_arguments({}, later), made, **asked))


for _name, _later, _of, _asked in LEAKAGE:
    case(_name)(lambda later=_later, of=_of, asked=_asked: leakage_checked(later, of, asked))


@pytest.mark.parametrize("name", ["gaussian_noise", "optimal_noise", "pruning", "quantization"])
def test_ligers_kernels_are_for_what_differentiates_once(name: str) -> None:
    """Alone, and neither measured, bounded nor accounted."""
    check_arguments(make_arguments(LIGER, {}))
    leakage_checked(LIGER, {"defense": name}, {})
    for later, accountant in (
        (LIGER | MEASURED, None),
        (LIGER | LIMITED, None),
        (LIGER, FisherAccountant()),
    ):
        with refuses("liger-twice"):
            leakage_checked(later, {"defense": name}, {"accountant": accountant})


# Trackers: test_trackers.py has more


def _tracker(name: str, **attributes: Any) -> TrainerCallback:
    return type(name, (TrainerCallback,), attributes)()


@case("wandb-watch")
def _wandb_watch() -> None:
    with mock.patch.dict(os.environ, WANDB_WATCH="all"):
        check_trackers([_tracker("WandbCallback")])


@case("wandb-checkpoints")
def _wandb_checkpoints() -> None:
    with mock.patch.dict(os.environ, WANDB_LOG_MODEL="checkpoint"):
        check_trackers([_tracker("WandbCallback")])


@case("comet-checkpoints")
def _comet() -> None:
    with mock.patch.dict(os.environ, COMET_LOG_ASSETS="1"):
        check_trackers([_tracker("CometCallback")])


@case("mlflow-checkpoints")
def _mlflow() -> None:
    with mock.patch.dict(os.environ, HF_MLFLOW_LOG_ARTIFACTS="true"):
        check_trackers([_tracker("MLflowCallback")])


@case("dagshub-folder")
def _dagshub() -> None:
    with mock.patch.dict(os.environ, HF_DAGSHUB_LOG_ARTIFACTS="yes"):
        check_trackers([_tracker("DagsHubCallback")])


@case("clearml-checkpoints")
def _clearml() -> None:
    with mock.patch.dict(os.environ, CLEARML_LOG_MODEL="TRUE"):
        check_trackers([_tracker("ClearMLCallback")])


for _name, _callback, _attribute in (
    ("neptune-checkpoints", "NeptuneCallback", {"_log_checkpoints": "last"}),
    ("dvclive-checkpoints", "DVCLiveCallback", {"_log_model": "all"}),
    ("flyte-checkpoints", "FlyteCallback", {"sync_checkpoints": True}),
    ("flyte-history", "FlyteCallback", {"save_log_history": True}),
):
    case(_name)(lambda n=_callback, a=_attribute: check_trackers([_tracker(n, **a)]))


# Classes, losses and batches


@case("own-training-step")
def _a_step_of_ones_own() -> None:
    class Stepping(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return torch.zeros(())

    class Wrong(GradGuardMixin, Stepping):
        pass


def _checked_drawing(**arguments: Any) -> None:
    class Drawing(GradGuardTrainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> None:
            return None

    kind = GradGuardTrainer if arguments else Drawing
    trainer = kind.__new__(kind)
    trainer.args = make_arguments({}, arguments)
    check_drawing(trainer, GradGuardMixin, "num_clients")


case("own-sampler")(_checked_drawing)
case("auto-batch-size")(lambda: _checked_drawing(auto_find_batch_size=True))


@case("gathering-loss")
def _a_loss_that_gathers() -> None:
    loss = nn.Sequential(nn.Linear(2, 2))
    loss[0].gather_across_devices = True  # type: ignore[assignment]
    check_loss({"mine": loss})


case("padding-free")(lambda: check_collator(DataCollatorWithFlattening()))
case("rows-of-one-example")(lambda: WholeCollator(lambda _: make_task("bert")[1])([{}]))


@case("entries-of-no-row")
def _a_batch_with_entries_of_no_row() -> None:
    batch = make_task("bert")[1] | {"extra": torch.zeros(3, 5)}
    list(clients_in({**batch, CLIENT: torch.tensor([0, 1]), SHARE: torch.tensor([0.5, 0.5])}))


@case("loss-normalization")
def _a_loss_that_is_neither_sum_nor_mean() -> None:
    model, batch = make_task("bert")
    weights = LossWeights(lambda _, __, items: torch.tensor((items or 1.0) ** -0.5))
    weights(model, [batch], Normalization(2, 1.0, 1, accumulated=True, shifts_labels=False))


@case("loss-that-exchanges")
def _a_loss_that_gathers_by_hand() -> None:
    accelerator = GuardedAccelerator(Accelerator(cpu=True), Ledger(), lambda number: None)
    with (
        mock.patch.object(type(accelerator), "num_processes", 2),
        accelerator.in_loss(keeps_own=False),
    ):
        accelerator.gather(torch.zeros(2))


def _shared_noise(defense: str, **more: Any) -> None:
    secure = {"secure_aggregation": True, "noise_for": "sum"}
    made = make_defense(defense, **({} if defense == "pruning" else {"scale": 0.1}))
    share_of_noise(made, make_arguments(secure, more), ranks=3)


case("sum-of-unknown-noise")(lambda: _shared_noise("pruning"))
case("sum-with-limit")(lambda: _shared_noise("gaussian_noise", leakage_limit=0.1))


def _trained(defense: str = "none", kind: type = GradGuardTrainer, **more: Any) -> None:
    model, batch = make_task("bert", dtype=torch.float32)
    rows = [{name: value[k] for name, value in batch.items()} for k in range(2)] * 2
    optimizer = more.pop("optimizers", (None, None))
    args = GradGuardConfig(
        "out", defense=defense, max_steps=1, use_cpu=True, report_to="none", disable_tqdm=True,
        save_strategy="no", per_device_train_batch_size=2, **more,
    )  # fmt: skip
    kind(model, args, train_dataset=rows, optimizers=optimizer).train()


@case("rows-of-no-client")
def _batches_of_no_client() -> None:
    class Own(GradGuardTrainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, 2, collate_fn=self.data_collator)

    _trained(kind=Own, num_clients=2)


@case("loss-with-parameters")
def _a_loss_with_parameters() -> None:
    factor = nn.Parameter(torch.ones(()))

    class Own(GradGuardTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) * factor

        def create_optimizer(self, *args: Any) -> Any:
            self.optimizer = torch.optim.SGD([*self.model.parameters(), factor], lr=0.1)
            return self.optimizer

    _trained(kind=Own)


@case("hook-of-every-optimizer")
def _a_hook_of_all_optimizers() -> None:
    def change(optimizer: Any, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(2)

    with register_optimizer_step_pre_hook(change):
        _trained()


# Proofs for rows and for labels: test_private_rows.py, test_correlated_rows.py, test_coupling.py
# and test_randomized_labels.py have more

SAMPLES: dict[str, Any] = {"per_sample": True, "noise_multiplier": 1.0, "delta": 1e-3}


def _private(defense: Any = None, rows: Any = None, **arguments: Any) -> None:
    model, batch = make_task("bert", dtype=torch.float32)
    if rows is None:
        rows = [{name: value[k] for name, value in batch.items()} for k in range(2)] * 2
    private = defense or make_defense("dp_sgd", **SAMPLES)
    args = make_arguments({}, {"per_device_train_batch_size": 2, "max_steps": 1, **arguments})
    GradGuardTrainer(model, args, defense=private, train_dataset=rows).train()


case("samples-in-chain")(
    lambda: _private(Chain(make_defense("dp_sgd", **SAMPLES), make_defense("quantization")))
)
case("samples-with-clients")(lambda: _private(num_clients=2))
case("samples-with-token-counts")(lambda: _private(include_num_input_tokens_seen="all"))
case("samples-of-own-batches")(lambda: _private(rows=Endless()))
case("samples-by-length")(lambda: _private(train_sampling_strategy="group_by_length"))


@case("coupled-rows")
def _rows_less_their_mean() -> None:
    rows = [{"x": torch.tensor([float(k)])} for k in range(2)]

    def centered(rows: list[Any]) -> dict[str, torch.Tensor]:
        x = torch.stack([row["x"] for row in rows])
        return {"x": x - x.mean(0)}

    CouplingCheck(rows, centered)([0, 1])


def _trial_of(*rows: dict[str, torch.Tensor]) -> None:
    RowTrial([*rows] * 8, lambda batch: {n: torch.stack([r[n] for r in batch]) for n in batch[0]})


@case("rows-of-several-forms")
def _sounds_of_two_lengths() -> None:
    _trial_of({"input_values": torch.zeros(400)}, {"input_values": torch.zeros(300)})


@case("rows-of-several-forms")
def _rows_of_which_some_have_a_column_more() -> None:
    _trial_of({"x": torch.zeros(3)}, {"x": torch.zeros(3), "score": torch.zeros(())})


@case("correlated-from-first-rows")
def _correlated_from_the_first_rows() -> None:
    _private(make_defense("dp_sgd", **SAMPLES, correlated=True), ignore_data_skip=True)


def _linear(schedule: Any = None, kind: Any = torch.optim.SGD) -> None:
    optimizer = kind(make_task("bert")[0].parameters(), lr=0.1)
    args = make_arguments({}, {})
    check_is_linear(optimizer, args, schedule and schedule(optimizer))


case("correlated-optimizer")(lambda: _linear(kind=torch.optim.Adam))
case("correlated-schedule")(lambda: _linear(torch.optim.lr_scheduler.ReduceLROnPlateau))


def _randomized(data: Any, own_batches: bool = False, **arguments: Any) -> Any:
    args = make_arguments(
        {}, {"protect_labels": "randomized_response", "label_epsilon": 1.0, **arguments}
    )
    model = make_task("bert")[0]
    model.config.num_labels = arguments.pop("classes", 3)
    return protect_labels(data, args, model, LabelKey(), own_batches)


NUMBERED = [{"labels": 1}]
case("labels-of-unnumbered-rows")(lambda: _randomized(Endless()))
case("labels-in-two-columns")(lambda: _randomized([{"labels": 1, "label": 1}])[0])
case("labels-of-no-class")(lambda: _randomized([{"labels": 0.5}])[0])
case("labels-of-no-class")(lambda: _randomized([{"text": "a"}])[0])
case("labels-of-own-batches")(lambda: _randomized(NUMBERED, own_batches=True))
case("labels-of-other-names")(lambda: _randomized(NUMBERED, label_names=["target"]))
case("labels-with-dirichlet")(lambda: _randomized(NUMBERED, num_clients=2, partition="dirichlet"))
case("labels-of-one-class")(lambda: _randomized(NUMBERED, classes=1))


# Hooks: test_torch_hooks.py has more


def _hooked(
    register: Callable[[Any], Any], differentiation: dict[str, Any], withheld: bool = False
) -> None:
    model = make_task("bert")[0]
    register(model)
    hooks = [*hooks_of_accumulation(model), *hooks_of(model)]
    names = [] if withheld else [name for name, _ in model.named_parameters()]
    settings = {"defense": make_defense("pruning"), **differentiation}
    check_hooks(model, hooks, Differentiation(**settings), names)


def _on_slopes(model: Any) -> None:
    model.classifier.bias.register_hook(lambda slope: slope)


def _on_sums(model: Any) -> None:
    model.classifier.bias.register_post_accumulate_grad_hook(lambda bias: None)


@case("hook-on-accumulation")
def _a_hook_on_accumulation() -> None:
    kept: list[Any] = []  # a step of autograd's lives as long as somebody holds it

    def register(model: Any) -> None:
        kept.append(torch.autograd.graph.get_gradient_edge(model.classifier.bias).node)
        kept[0].register_hook(lambda *_: None)

    _hooked(register, {})


@case("hook-on-sharded-model")
def _a_hook_on_a_sharded_model() -> None:
    with mock.patch("hf_gradguard.training.guards.hooks.is_sharded", return_value=True):
        _hooked(_on_slopes, {})


case("hook-on-withheld")(lambda: _hooked(_on_slopes, {}, withheld=True))
case("hook-on-part-of-noise")(lambda: _hooked(_on_sums, {"is_summed": True}))
case("hook-on-scaled")(lambda: _hooked(_on_sums, {"is_scaled": True}))
case("hook-on-samples")(lambda: _hooked(_on_slopes, {"defense": make_defense("dp_sgd", **SAMPLES)}))
case("hook-beside-defense")(lambda: _hooked(_on_slopes, {"defense": make_defense("soteria")}))
case("hook-beside-leakage")(lambda: _hooked(_on_slopes, {"is_measured": True}))
case("hook-on-one-of-several")(lambda: _hooked(_on_slopes, {"messages": 2}))


@case("saved-tensors-hooks")
def _saved_tensors_hooks() -> None:
    with save_on_cpu():
        _hooked(lambda model: None, {"defense": make_defense("dp_sgd", **SAMPLES)})


@case("hook-that-steps")
def _a_hook_that_steps() -> None:
    bias = nn.Parameter(torch.zeros(2))
    bias.grad = torch.ones(2)
    bias.register_post_accumulate_grad_hook(lambda parameter: parameter.sub_(parameter.grad))
    run_hooks_on_sums([bias])


@case("hook-in-audit")
def _a_hook_in_an_audit() -> None:
    model = make_task("bert")[0]
    _on_slopes(model)
    check_free_of_hooks(model)


@case("hook-on-wrapper")
def _a_hook_on_a_wrapper() -> None:
    model, batch = make_task("bert")
    wrapper = _distributed(model)
    wrapper.register_forward_hook(lambda *_: None)
    protect(wrapper, batch, "none")


# What a model keeps of private rows: test_kept_state.py has more


@case("saved-state-of-rows")
def _batch_statistics() -> None:
    layer = nn.BatchNorm1d(2)
    guard = KeptState(True, is_frozen=False, instead="Leave it out.")
    with guard.watch(layer, {}, lambda layer, batch: layer(torch.rand(4, 2)).sum()):
        layer(torch.rand(4, 2))


@case("lasting-state-of-rows")
def _a_model_that_changes_its_weights() -> None:
    layer = nn.Linear(2, 2)
    guard = KeptState(True, is_frozen=True, instead="")
    with (
        guard.watch(layer, {}, lambda layer, batch: layer(torch.rand(4, 2)).sum()),
        torch.no_grad(),
    ):
        layer.weight.add_(torch.rand(2, 2))


def test_a_name_that_is_no_rule_s() -> None:
    with pytest.raises(KeyError):
        refusal("no-rule")
