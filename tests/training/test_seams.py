"""Private names of other libraries: all are listed here, and the installed versions have them."""

from __future__ import annotations

import ast
import dis
import inspect
import pkgutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import Trainer

import hf_gradguard

PACKAGE = Path(hf_gradguard.__file__).parent


class Seam(NamedTuple):
    """A private name of another library.

    Args:
        owner: Of the name, as `"module:Class"`.
        name: What it is called there.
        used: The file that relies on it, and for what.
    """

    owner: str
    name: str
    used: str

    def holds(self) -> bool:
        """Whether the installed version has the name: as an attribute of the owner, or as one that
        its methods set.
        """
        try:
            owner = pkgutil.resolve_name(self.owner)
        except (ImportError, AttributeError):
            return False
        declared = getattr(owner, "__annotations__", {})
        return hasattr(owner, self.name) or self.name in declared or self._is_set_by(owner)

    def _is_set_by(self, owner: Any) -> bool:
        members = vars(owner).values()
        setters = [member.fset for member in members if isinstance(member, property)]
        return any(
            instruction.opname == "STORE_ATTR"
            for method in filter(inspect.isfunction, [*members, *setters])
            if self.name in method.__code__.co_names
            for instruction in dis.get_instructions(method)
            if instruction.argval == self.name
        )


_TRAINER, _MODULE, _CONFIG = (
    "transformers:Trainer",
    "torch.nn:Module",
    "transformers:PreTrainedConfig",
)
SEAMS = (
    Seam(
        _MODULE,
        "_state_dict_hooks",
        "gradient_map/replay.py asks whether a state_dict holds more than tensors",
    ),
    Seam(_MODULE, "_state_dict_pre_hooks", "gradient_map/replay.py likewise"),
    Seam(_MODULE, "_save_to_state_dict", "gradient_map/replay.py likewise"),
    Seam(_TRAINER, "_prepare_inputs", "training/mixin.py moves a batch to the device"),
    Seam(_TRAINER, "_get_dataloader", "training/mixin.py loads what a sampler of ours draws"),
    Seam(
        _TRAINER,
        "_remove_unused_columns",
        "training/mixin.py numbers the rows that are left",
    ),
    Seam(
        _TRAINER,
        "_get_collator_with_removed_columns",
        "training/mixin.py adds to a batch whose rows they are",
    ),
    Seam(_TRAINER, "_maybe_log_save_evaluate", "training/mixin.py logs leakage before a save"),
    Seam(
        _TRAINER,
        "_globalstep_last_logged",
        "training/mixin.py averages a loss that is logged",
    ),
    Seam(
        _TRAINER,
        "_get_num_items_in_batch",
        "training/mixin.py leaves counts of labels out",
    ),
    Seam(
        _TRAINER,
        "_save_rng_state",
        "training/mixin.py writes defenses' state to a checkpoint",
    ),
    Seam(_TRAINER, "_load_optimizer_and_scheduler", "training/mixin.py reads that state again"),
    Seam(
        _TRAINER,
        "_hp_search_setup",
        "training/mixin.py reads the settings when training begins",
    ),
    Seam(_TRAINER, "_save_checkpoint", "training/mixin.py marks complete checkpoints"),
    Seam(_TRAINER, "_build_accelerator_args", "training/mixin.py leaves FSDP to its accelerator"),
    Seam(_TRAINER, "_issue_warnings_after_load", "training/mixin.py refuses renamed weights"),
    Seam(_TRAINER, "_push_from_checkpoint", "training/mixin.py pushes no private files"),
    Seam(
        "transformers.trainer",
        "hf_api",
        "training/checkpoints/complete.py leaves out private files",
    ),
    Seam(_TRAINER, "_get_output_dir", "training/mixin.py finds the folder of a checkpoint"),
    Seam(
        "transformers:TrainingArguments",
        "_VALID_DICT_FIELDS",
        "training/config.py lets the command line give defense_kwargs as JSON",
    ),
    Seam(_CONFIG, "_attn_implementation", "gradient_map/replay.py finds fused attention"),
    Seam(_CONFIG, "_attn_implementation_internal", "gradient_map/replay.py sets plain attention"),
    *(
        Seam(
            f"torch.optim.lr_scheduler:{kind}",
            name,
            "training/learning_rate.py changes the rates of a schedule that was loaded",
        )
        for kind, name in (("LRScheduler", "_last_lr"), ("SequentialLR", "_schedulers"))
    ),
    Seam(_MODULE, "_compiled_call_impl", "training/refusals.py refuses compiled modules"),
    Seam("torch._dynamo", "OptimizedModule", "training/refusals.py refuses compiled models"),
    Seam(_MODULE, "_buffers", "gradient_map/replay.py keeps batch statistics as they were"),
    Seam(
        "torch.nn.modules.batchnorm",
        "_NormBase",
        "training/exchange/gradients.py finds batch statistics",
    ),
    Seam(
        "torch.nn.modules.instancenorm",
        "_InstanceNorm",
        "gradient_map/per_sample/clipping.py tells what mixes samples",
    ),
    Seam(
        "accelerate:Accelerator",
        "_dataloaders",
        "training/loop.py refuses loaders that dispatch",
    ),
    Seam("torch:ScriptObject", "_type", "gradient_map/exchanges.py finds a collective's devices"),
    Seam("torch:UntypedStorage", "_cdata", "gradient_map/lookups.py tells storages apart"),
    Seam(
        "torch._ops:OpOverload",
        "_schema",
        "gradient_map/lookups.py sees what is written in place",
    ),
    Seam(
        "torch:Tensor",
        "_version",
        "gradient_map/map.py and training/exchange/gradients.py see that a tensor was written to",
    ),
    *(
        Seam(owner, name, "testing/facts.py sees that an attack or a defense left a hook")
        for owner, name in (
            (_MODULE, "_forward_hooks"),
            (_MODULE, "_forward_pre_hooks"),
            (_MODULE, "_backward_hooks"),
            (_MODULE, "_backward_pre_hooks"),
            ("torch:Tensor", "_backward_hooks"),
        )
    ),
    *(
        Seam(owner, name, "training/guards/hooks.py finds the hooks that see gradients")
        for owner, name in (
            (_MODULE, "_is_full_backward_hook"),
            ("torch:Tensor", "_post_accumulate_grad_hooks"),
            ("torch.nn.modules.module", "_global_backward_hooks"),
            ("torch.nn.modules.module", "_global_backward_pre_hooks"),
            ("torch.nn.modules.module", "_global_is_full_backward_hook"),
            ("torch._C._autograd", "_top_saved_tensors_default_hooks"),
        )
    ),
    *(
        Seam("torch.nn.modules.module", name, "gradient_map/forward_hooks.py finds users' hooks")
        for name in ("_global_forward_hooks", "_global_forward_pre_hooks")
    ),
    Seam(
        "torch.nn.modules.module",
        "_has_any_global_hook",
        "gradient_map/replay.py and audit/run.py look for hooks on all modules",
    ),
    Seam("torch", "_C", "training/guards/hooks.py asks which tensors are packed"),
    Seam("torch._C", "_autograd", "training/guards/hooks.py asks which tensors are packed"),
    Seam(
        "torch.optim:Optimizer",
        "_optimizer_step_pre_hooks",
        "training/exchange/gradients.py looks before other hooks of an optimizer",
    ),
    Seam(
        "torch.optim.optimizer",
        "_global_optimizer_pre_hooks",
        "training/exchange/gradients.py says which hook came before",
    ),
)
NAMES = {seam.name for seam in SEAMS}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_every_private_name_of_another_library_is_listed() -> None:
    """Whatever private attribute the package uses and does not define itself."""
    used: dict[str, Path] = {}
    own: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and private(node.attr):
                of_base = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
                if of_base and hasattr(Trainer, node.attr):
                    assert node.attr in NAMES, f"{path}: {node.attr}"
                elif isinstance(node.ctx, ast.Load):
                    used[node.attr] = path
                elif ast.unparse(node.value) == "self":
                    own.add(node.attr)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                own |= {target.id for target in targets if isinstance(target, ast.Name)}
    named_tuples = {"_asdict", "_replace", "_fields"}  # public, in spite of their names
    missing = {name: path for name, path in used.items() if name not in own | named_tuples}
    assert not {name: path for name, path in missing.items() if name not in NAMES}


def test_files_that_use_a_name_are_the_ones_listed() -> None:
    for seam in SEAMS:
        files = [word for word in seam.used.split() if word.endswith(".py")]
        assert files
        for file in files:
            assert seam.name in (PACKAGE / file).read_text(), f"{file}: {seam.name}"


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_the_installed_version_has_the_name(seam: Seam) -> None:
    assert seam.holds()
