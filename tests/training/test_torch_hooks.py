"""Hooks that users register with torch: each runs as in a plain training, to 1e-6, or is refused by
its name. One test a cell: hook × how messages are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import example_names
from helpers import make_task, refuses
from torch import nn
from torch.autograd.graph import (
    get_gradient_edge,
    register_multi_grad_hook,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.nn.modules import module as every_module
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_gradguard import GradGuardConfig, GradGuardTrainer, make_defense, protect
from hf_gradguard.audit import audit
from hf_gradguard.leakage import FisherAccountant

ROWS = 16
SMALL = 1e-3


def data() -> list[dict[str, Any]]:
    batch = make_task("bert", batch_size=ROWS)[1]
    return [{key: value[row] for key, value in batch.items()} for row in range(ROWS)]


def small_(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-SMALL, SMALL)


def small(slope: torch.Tensor) -> torch.Tensor:
    return slope.clamp(-SMALL, SMALL)


def halved_slope(slope: torch.Tensor) -> torch.Tensor:
    return slope / 2


def halved(slopes: Any) -> tuple[Any, ...]:
    return tuple(None if slope is None else slope / 2 for slope in slopes)


class Counting:
    """A forward hook with a state: what it returns follows how often it ran."""

    def __init__(self) -> None:
        self.passes, self.outputs = 0, list[float]()

    def __call__(self, _module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.outputs.append(float(output.detach().sum()))
        return output * (1 + 0.1 * self.passes + 1e-4 * len(self.outputs))


def counting_by_closure(model: Any) -> None:
    passes = [0]

    def called(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        passes[0] += 1
        return output * (1 + 0.1 * passes[0])

    model.bert.pooler.register_forward_hook(called)


def on_slopes_of_output(model: Any) -> None:
    def called(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda slope: slope / 2)

    model.bert.pooler.register_forward_hook(called)


def on_node_of_output(model: Any) -> None:
    def called(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        assert output.grad_fn is not None
        output.grad_fn.register_prehook(halved)

    model.bert.pooler.register_forward_hook(called)


def on_accumulation(kind: str) -> Callable[[Any], None]:
    def register(model: Any) -> None:
        model.kept_step = [get_gradient_edge(model.classifier.weight).node]
        if kind == "register_prehook":
            model.kept_step[0].register_prehook(halved)
        else:
            model.kept_step[0].register_hook(lambda *_: small_(model.classifier.weight))

    return register


def on_several(model: Any) -> None:
    register_multi_grad_hook(list(model.classifier.parameters()), lambda _: None)


def steps_within(model: Any) -> None:
    def step(parameter: nn.Parameter) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    model.classifier.weight.register_post_accumulate_grad_hook(step)


def takes_gradient_away(model: Any) -> None:
    def take(parameter: nn.Parameter) -> None:
        parameter.grad = None

    model.classifier.weight.register_post_accumulate_grad_hook(take)


SUM, SLOPES = "register_post_accumulate_grad_hook", "Tensor.register_hook"
HOOKS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "after accumulation": (
        "", lambda m: m.classifier.weight.register_post_accumulate_grad_hook(small_)
    ),
    "after accumulation of each": (
        "",
        lambda m: [
            p.register_post_accumulate_grad_hook(small_) for p in m.parameters() if p.requires_grad
        ],
    ),
    "on a parameter": ("slopes", lambda m: m.classifier.weight.register_hook(small)),
    "full backward": (
        "slopes",
        lambda m: m.classifier.register_full_backward_hook(lambda _m, slopes, _: halved(slopes)),
    ),
    "full backward pre": (
        "slopes",
        lambda m: m.classifier.register_full_backward_pre_hook(lambda _m, slopes: halved(slopes)),
    ),
    "legacy backward": (
        "slopes",
        lambda m: m.classifier.register_backward_hook(lambda _m, slopes, _: halved(slopes)),
    ),
    "forward": (
        "", lambda m: m.bert.pooler.register_forward_hook(lambda _m, _args, output: output / 2)
    ),
    "forward pre": (
        "", lambda m: m.bert.pooler.register_forward_pre_hook(lambda _m, args: halved(args))
    ),
    "forward with a state": ("state", lambda m: m.bert.pooler.register_forward_hook(Counting())),
    "forward with a method": (
        "state", lambda m: m.bert.pooler.register_forward_hook(Counting().__call__)
    ),
    "forward with a closure": ("state", counting_by_closure),
    "on an output": ("", on_slopes_of_output),
    "on an output's node": ("", on_node_of_output),
    "node": ("never", on_accumulation("register_hook")),
    "node pre": ("never", on_accumulation("register_prehook")),
    "several gradients": ("never", on_several),
    "steps within": ("never", steps_within),
    "takes away": ("never", takes_gradient_away),
}  # fmt: skip
NAMES = {
    "on a parameter": SLOPES,
    "full backward": "Module.register_full_backward_hook",
    "full backward pre": "Module.register_full_backward_pre_hook",
    "legacy backward": "Module.register_backward_hook",
    "node": "Node.register_hook",
    "node pre": "Node.register_prehook",
    "several gradients": "register_multi_grad_hook",
    "steps within": SUM,
    "takes away": SUM,
}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "clients": {"clients_per_process": 2},
}
DEFENSES: dict[str, dict[str, Any]] = {
    "gaussian_noise": {"relative_scale": 1.0},
    "dp_sgd": {"per_sample": True, "noise_multiplier": 1.0, "delta": 1e-3},
    "optimal_noise": {"relative_scale": 1.0},
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:Using a non-full backward hook"),
    pytest.mark.filterwarnings("ignore:Converting a tensor"),
]


def trained(
    kind: type, register: Callable[[Any], object], folder: Path, callbacks: Any = (), **more: Any
) -> Any:
    torch.manual_seed(0)
    model = make_task("bert", dtype=torch.float32)[0].train()
    register(model)
    optimizer = more.pop("optimizer", None)
    settings: Any = {
        "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True,
        "max_steps": 2, "per_device_train_batch_size": 4, "save_strategy": "no", "optim": "sgd",
        "learning_rate": 0.1, "logging_strategy": "no", **more,
    }  # fmt: skip
    accountant = settings.pop("accountant", None)
    if kind is Trainer:
        settings.pop("clients_per_process", None)
        args: Any = TrainingArguments(**settings)
        own: Any = {}
    else:
        shared: Any = {"defense": "none", "share_input_embeddings": True}
        args, own = GradGuardConfig(**{**shared, **settings}), {"accountant": accountant}
    given = (None if optimizer is None else optimizer(model), None)
    trainer = kind(
        model=model, args=args, train_dataset=data(), callbacks=list(callbacks), optimizers=given,
        **own,
    )  # fmt: skip
    trainer.train()
    return trainer


def farthest(first: Any, second: Any) -> float:
    """The largest difference of two Trainers' weights."""
    others = second.model.state_dict()
    return max(
        float((tensor - others[name]).abs().max())
        for name, tensor in first.model.state_dict().items()
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_runs_as_in_stock_or_is_refused(hook: str, mode: str, tmp_path: Path) -> None:
    sees, register = HOOKS[hook]
    if sees == "never" or (sees == "slopes" and mode != "plain"):
        with pytest.raises(NotImplementedError, match=NAMES[hook]) as refusal:
            trained(GradGuardTrainer, register, tmp_path, **MODES[mode])
        assert any(way in str(refusal.value) for way in ("Remove it", "Change .grad in place"))
        return
    if sees == "state" and mode == "clients":
        return  # there is a pass for each client
    stock = trained(Trainer, register, tmp_path, **MODES[mode])
    without = trained(Trainer, lambda _: None, tmp_path, **MODES[mode])
    assert farthest(stock, without) > 1e-5, "the hook does nothing that could be seen"
    assert farthest(stock, trained(GradGuardTrainer, register, tmp_path, **MODES[mode])) < 1e-6


@pytest.mark.parametrize("defense", DEFENSES)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_under_protection_runs_or_is_refused(
    hook: str, defense: str, tmp_path: Path
) -> None:
    sees, register = HOOKS[hook]
    settings = {"defense": defense, "defense_kwargs": DEFENSES[defense]}
    if sees == "state" and defense == "dp_sgd":  # its passes differ, so samples are coupled
        name = "coupled"
    elif sees == "never" or (sees == "slopes" and defense != "gaussian_noise"):
        name = NAMES[hook]
    else:
        assert trained(GradGuardTrainer, register, tmp_path, **settings).state.global_step == 2
        return
    with pytest.raises(NotImplementedError, match=name):
        trained(GradGuardTrainer, register, tmp_path, **settings)


def test_what_is_protected_is_what_a_hook_is_given(tmp_path: Path) -> None:
    """Behind noise far larger than any gradient, a hook sees that noise: once a micro-batch, with
    all clients' messages in it.
    """
    norms: list[float] = []

    def register(model: Any) -> None:
        model.classifier.weight.register_post_accumulate_grad_hook(
            lambda weight: norms.append(float(weight.grad.abs().max()))
        )

    noise = {"defense": "gaussian_noise", "defense_kwargs": {"scale": 100.0}}
    modes = {**MODES["accumulation"], **MODES["clients"]}
    trained(GradGuardTrainer, register, tmp_path, **noise, **modes, learning_rate=0.0)
    assert len(norms) == 4
    assert min(norms) > 10


SETTINGS: dict[str, dict[str, Any]] = {
    "leakage_logging_steps": {"defense": "gaussian_noise", "leakage_logging_steps": 1},
    "an accountant": {
        "defense": "gaussian_noise", "defense_kwargs": {"scale": 0.1},
        "accountant": FisherAccountant(),
    },
}  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_nothing_is_measured_of_a_gradient_that_a_hook_changes(
    setting: str, tmp_path: Path
) -> None:
    register = HOOKS["on a parameter"][1]
    with refuses("hook-beside-leakage"):
        trained(GradGuardTrainer, register, tmp_path, **SETTINGS[setting])


@pytest.mark.parametrize("kind", ["register_hook", SUM])
def test_a_hook_on_a_withheld_parameter_is_refused(kind: str, tmp_path: Path) -> None:
    def register(model: Any) -> None:
        getattr(model.bert.embeddings.word_embeddings.weight, kind)(lambda *_: None)

    with refuses("hook-on-withheld"):
        trained(GradGuardTrainer, register, tmp_path, share_input_embeddings=False)
    trained(GradGuardTrainer, register, tmp_path)


def test_a_hook_that_a_callback_registers_is_seen(tmp_path: Path) -> None:
    class Registers(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, *_: Any, model: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                model.classifier.weight.register_hook(small)

    samples = {"defense": "dp_sgd", "defense_kwargs": DEFENSES["dp_sgd"]}
    with refuses("hook-on-samples"):
        trained(GradGuardTrainer, lambda _: None, tmp_path, callbacks=[Registers()], **samples)


@pytest.fixture(name="global_kind")
def _global_kind() -> Iterator[None]:
    """torch remembers which kind was registered last."""
    yield
    every_module._global_is_full_backward_hook = None


GLOBAL: dict[str, Callable[..., Any]] = {
    "register_module_forward_hook": lambda module, _args, output: (
        output * 0.9 if type(module) is nn.Linear else None
    ),
    "register_module_forward_hook that registers": lambda module, _args, output: (
        output if type(module) is not nn.Linear or output.register_hook(halved_slope) else None
    ),
    "register_module_forward_pre_hook": lambda module, args: (
        (args[0] * 0.9,) if type(module) is nn.Linear else None
    ),
    "register_module_full_backward_hook": lambda *_: None,
    "register_module_full_backward_pre_hook": lambda *_: None,
    "register_module_backward_hook": lambda *_: None,
}


@pytest.mark.parametrize("kind", GLOBAL)
@pytest.mark.usefixtures("global_kind")
def test_hooks_of_all_modules(kind: str, tmp_path: Path) -> None:
    register = lambda _: None  # noqa: E731
    with getattr(every_module, kind.split()[0])(GLOBAL[kind]):
        if "backward" in kind:
            settings = {"defense": "dp_sgd", "defense_kwargs": DEFENSES["dp_sgd"]}
            with refuses("hook-on-samples"):
                trained(GradGuardTrainer, register, tmp_path, **settings)
        else:
            stock = trained(Trainer, register, tmp_path)
            assert farthest(stock, trained(GradGuardTrainer, register, tmp_path)) < 1e-6


PACKERS: dict[str, Callable[[], Any]] = {
    "save_on_cpu": save_on_cpu,
    "lossy": lambda: saved_tensors_hooks(
        lambda t: t.bfloat16() if t.is_floating_point() else t,
        lambda t: t.float() if t.is_floating_point() else t,
    ),
}


@pytest.mark.parametrize("packer", PACKERS)
def test_saved_tensors_hooks(packer: str, tmp_path: Path) -> None:
    register = lambda _: None  # noqa: E731
    with PACKERS[packer]():
        stock = trained(Trainer, register, tmp_path)
        assert farthest(stock, trained(GradGuardTrainer, register, tmp_path)) < 1e-6
        settings = {"defense": "dp_sgd", "defense_kwargs": DEFENSES["dp_sgd"]}
        with refuses("saved-tensors-hooks"):
            trained(GradGuardTrainer, register, tmp_path, **settings)


def small_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        if parameter.grad is not None:
            parameter.grad.clamp_(-SMALL, SMALL)


@pytest.mark.parametrize("kind", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_of_an_optimizer(kind: str, tmp_path: Path) -> None:
    def optimizer(model: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        getattr(made, kind)(small_gradients)
        return made

    more: Any = {"optimizer": optimizer, "max_grad_norm": 0.0}
    stock = trained(Trainer, lambda _: None, tmp_path, **more)
    assert farthest(stock, trained(GradGuardTrainer, lambda _: None, tmp_path, **more)) < 1e-6


@pytest.mark.parametrize("changes", [True, False])
def test_hooks_of_all_optimizers(changes: bool, tmp_path: Path) -> None:
    """They run before the one that sees that gradients were exchanged."""
    hook: Any = small_gradients if changes else lambda *_: None
    expected = refuses("hook-of-every-optimizer") if changes else nullcontext()
    with register_optimizer_step_pre_hook(hook), expected:
        trained(GradGuardTrainer, lambda _: None, tmp_path)


# Loops of one's own


@pytest.mark.parametrize("hook", HOOKS)
def test_protect_runs_hooks_as_a_backward_pass_does(hook: str) -> None:
    sees, register = HOOKS[hook]
    gradients = []
    for protected in (False, True):
        model, batch = make_task("bert", dtype=torch.float32)
        model.bert.embeddings.word_embeddings.weight.requires_grad_(False)
        register(model)
        expected = (
            pytest.raises(NotImplementedError, match=NAMES[hook])
            if protected and sees == "never"
            else nullcontext()
        )
        with expected:
            if protected:
                protect(model, batch, "none")
            else:
                model(**batch).loss.backward()
        named = model.named_parameters()
        gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})
    if sees != "never":
        stock, ours = gradients
        assert stock.keys() == ours.keys()
        for name, gradient in stock.items():
            torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-7)


@pytest.mark.parametrize("hook", [name for name, (sees, _) in HOOKS.items() if sees == "slopes"])
def test_protect_by_samples_refuses_hooks_on_the_way_back(hook: str) -> None:
    model, batch = make_task("bert", dtype=torch.float32)
    HOOKS[hook][1](model)
    defense = make_defense("dp_sgd", **DEFENSES["dp_sgd"])
    with pytest.raises(NotImplementedError, match=NAMES[hook]):
        protect(model, batch, defense)


# Audits


@pytest.mark.parametrize("hook", ["after accumulation", "on a parameter", "full backward"])
def test_an_audit_refuses_hooks_that_see_gradients(hook: str, tmp_path: Path) -> None:
    names = example_names("model tokenizer samples")
    HOOKS[hook][1](names["model"])
    audited = names["model"], names["tokenizer"], names["samples"]
    with refuses("hook-in-audit"):
        audit(*audited, "pruning", "span", output=tmp_path)
