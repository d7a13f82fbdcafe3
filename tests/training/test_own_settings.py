"""Ranks compare every setting but those that are listed here: also one that a newer version of
Transformers brings.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers import TrainingArguments

from hf_gradguard import GradGuardConfig
from hf_gradguard.training.exchange.own_settings import compared_settings
from hf_gradguard.training.exchange.start import BEGUN, OPTIMIZER, agreed_upon, differences

OWN = {
    *("output_dir", "run_name", "project", "trackio_space_id", "trackio_bucket_id"),
    *("trackio_static_space_id", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id"),
    *("hub_strategy", "hub_always_push", "hub_revision", "save_total_limit", "save_on_each_node"),
    *("model_name_or_path", "secure_aggregation_keys", "resume_from_checkpoint", "logging_dir"),
    *("local_rank", "use_cpu", "tf32", "torch_compile", "torch_compile_backend"),
    *("torch_compile_mode", "torch_empty_cache_steps", "use_liger_kernel", "liger_kernel_config"),
    *("activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing"),
    *("gradient_checkpointing_kwargs", "use_cache", "eval_accumulation_steps", "ddp_timeout"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
    *("skip_memory_metrics", "report_to", "log_level", "log_level_replica", "log_on_each_node"),
    *("disable_tqdm", "logging_nan_inf_filter", "leakage_logging_steps", "leakage_num_probes"),
    *("private_metrics", "seed", "data_seed", "remove_unused_columns", "dataloader_drop_last"),
    *("length_column_name", "train_sampling_strategy", "defense", "defense_kwargs"),
    *("protect_labels", "label_epsilon", "private_dropout", "noise_seed", "check_received"),
    *("do_train", "do_eval", "do_predict"),
}
"""What a rank may choose for itself, under the usual settings."""
SOMETIMES: dict[str, dict[str, Any]] = {
    "save_steps": {},
    "logging_steps": {},
    "eval_steps": {"eval_strategy": "steps", "eval_steps": 3},
    "eval_delay": {"eval_strategy": "steps", "eval_steps": 3},
    "per_device_eval_batch_size": {"eval_strategy": "steps", "eval_steps": 3},
    "leakage_action": {"leakage_limit": 0.5},
    "clients_per_process": {"num_clients": 8},
    "partition": {"num_clients": 8},
    "dirichlet_alpha": {"num_clients": 8},
    "per_device_train_batch_size": {"num_clients": 8},
    "data_seed": {"num_clients": 8},
}
"""What counts where something follows it, and the settings under which it does."""
NEVER = {
    "save_steps": {"save_strategy": "no"},
    "logging_steps": {"logging_strategy": "no"},
}


def another(setting: Any) -> Any:
    """A value that differs from a field's, of a kind that arithmetic still takes."""
    if isinstance(setting, bool):
        return not setting
    if isinstance(setting, int | float):
        return setting + 1
    return ["another"] if isinstance(setting, list) else "another"


def differing(name: str, **settings: Any) -> set[str]:
    """The names that ranks find to differ where one field alone does."""
    args = GradGuardConfig("out", use_cpu=True, **settings)
    changed = copy.copy(args)
    setattr(changed, name, another(getattr(args, name)))
    one, two = (agreed_upon(each, nn.Linear(3, 2)) for each in (args, changed))
    return {entry for entry in one if one[entry] != two[entry]}


@pytest.mark.parametrize("name", [field.name for field in fields(GradGuardConfig)])
def test_every_setting_is_compared_or_listed_here(name: str) -> None:
    if name == "leakage_limit":  # whether there is one says whether its action counts
        assert differing(name) == {"leakage_action"}
    elif name in SOMETIMES:
        assert name in differing(name, **SOMETIMES[name])
        assert name not in differing(name, **NEVER.get(name, {}))
    else:
        assert (name in differing(name)) == (name not in OWN)


def test_messages_of_a_sum_are_counted_alike() -> None:
    summed = {"secure_aggregation": True, "noise_for": "sum"}
    assert differing("clients_per_process", **summed) == {"clients_per_process"}


def test_a_new_setting_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a newer version of Transformers may bring it."""

    @dataclass
    class Newer(GradGuardConfig):
        exchange_twice: bool = False

    monkeypatch.setattr("hf_gradguard.training.exchange.own_settings.GradGuardConfig", Newer)
    assert compared_settings(Newer("out", exchange_twice=True))["exchange_twice"] is True


def test_plain_arguments_agree_with_ours() -> None:
    """What `TrainingArguments` lack is what `GradGuardConfig` has by default."""
    plain = TrainingArguments("out", use_cpu=True)
    assert compared_settings(plain) == compared_settings(GradGuardConfig("out", use_cpu=True))


def test_objects_count_by_their_content_or_class() -> None:
    """Their addresses differ from process to process."""
    args = GradGuardConfig("out", use_cpu=True, lr_scheduler_kwargs={"lr_lambda": object()})
    again = GradGuardConfig("out", use_cpu=True, lr_scheduler_kwargs={"lr_lambda": object()})
    assert repr(compared_settings(args)) == repr(compared_settings(again))
    apart = GradGuardConfig("out", use_cpu=True, accelerator_config={"use_seedable_sampler": False})
    settings, others = compared_settings(args), compared_settings(apart)
    assert settings["accelerator_config"] != others["accelerator_config"]


def test_ranks_begin_at_one_step() -> None:
    args = GradGuardConfig("out", use_cpu=True, max_steps=9)
    one, two = (
        agreed_upon(args, nn.Linear(3, 2), SimpleNamespace(max_steps=9, global_step=step))
        for step in (0, 3)
    )
    assert {name for name in one if one[name] != two[name]} == {BEGUN}
    assert "Resume every rank from the checkpoint of the same step" in differences([BEGUN])


@pytest.mark.parametrize(
    "name",
    ["optim", "optim_args", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2",
     "adam_epsilon", "warmup_steps", "warmup_ratio", "the model's parameters, and which of them "
     "are trained"],
)  # fmt: skip
def test_what_follows_from_another_setting_is_not_said(name: str) -> None:
    """An optimizer differs because a setting of it does."""
    said = differences([name, OPTIMIZER])
    assert said.startswith(f"{name}, so nothing was trained")
    assert differences(["save_steps", OPTIMIZER]).startswith(f"save_steps, {OPTIMIZER}, so")
