"""Hooks that users register with torch: each runs as in a plain training, or is refused.

A message is differentiated by `torch.autograd.grad` and added to `.grad` by hand. So hooks of the
forward pass and of optimizers run by themselves, as do hooks on the way back where a message is one
plain derivative. Hooks that wait for `.grad` are run by hand, on what is protected. All others
would be left out without a word, and are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules import module as every_module
from transformers import TrainerCallback, TrainingArguments

from ...defenses import Defense
from ...gradient_map.parameters import is_sharded
from ..config import setting
from ..refusals import HOOKS, Measured, refusal, refuse


class HookGuard(TrainerCallback):
    """A guard that looks before each optimizer step for hooks that would not run as usual.

    It runs those that wait for `.grad`.

    Args:
        trainer: The protected Trainer.

    Attributes:
        has_sums: Whether any hook waits for `.grad`.

    Example:
        >>> guard = HookGuard(trainer=None)
        >>> guard.has_sums  # nothing was looked at yet
        False
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.has_sums = False

    def on_train_begin(self, args: TrainingArguments, *_: Any, **kwargs: Any) -> None:
        """Look also at the steps of autograd that add to `.grad`, which takes a while."""
        self._check(hooks_of_accumulation(self._trainer.model))

    def on_step_begin(self, args: TrainingArguments, *_: Any, **kwargs: Any) -> None:
        """Look again, for a callback may have registered one since."""
        self._check(())

    def on_substep_end(self, args: TrainingArguments, *_: Any, **kwargs: Any) -> None:
        """Look again before the next micro-batch."""
        self._check(())

    def _check(self, hooks: Iterable[Hook]) -> None:
        trainer, hooks = self._trainer, [*hooks, *hooks_of(self._trainer.model)]
        if hooks or packs_tensors():
            shared_names = trainer.shared_names
            check_hooks(trainer.model, hooks, Differentiation.of_trainer(trainer), shared_names)
        self.has_sums = any(hook.sees == "sum" for hook in hooks)

    def run(self, parameters: Iterable[nn.Parameter]) -> None:
        """Run the hooks that wait for `.grad`, when all messages of a micro-batch are in it.

        Raises:
            UnsupportedError: If a hook does more than change `.grad`.
        """
        summed = [parameter for parameter in parameters if parameter.grad is not None]
        self._trainer.ledger.check(summed, "run hooks")
        run_hooks_on_sums(summed)
        self._trainer.ledger.write(summed)


class Hook(NamedTuple):
    """A hook that sees gradients.

    Args:
        call: The function that registers such hooks.
        place: The name of what has it in the model, or what it is of.
        sees: What it sees: `"slopes"`, on the way back; `"sum"`, once a gradient was added to
            `.grad`; `"step"`, at the step of autograd that adds it.
        package: The package where its function was written.
    """

    call: str
    place: str
    sees: str
    package: str


class Differentiation(NamedTuple):
    """The way a training makes gradients of batches.

    Args:
        defense: The defense that protects them.
        is_measured: Whether the leakage of messages is estimated.
        messages: The number of messages that an optimizer step adds up, on all ranks.
        is_summed: Whether noise is stated for a sum of messages, of which each has a share.
        is_scaled: Whether losses are scaled, as in fp16.
    """

    defense: Defense
    is_measured: bool = False
    messages: int = 1
    is_summed: bool = False
    is_scaled: bool = False

    @classmethod
    def of_trainer(cls, trainer: Any) -> Differentiation:
        """Return the way of a protected Trainer as it is now."""
        args, defense = trainer.args, trainer.defense
        return cls(
            defense,
            Measured(args, defense, trainer.accountant).measures,
            trainer.messages_per_step * setting(args, "clients_per_process"),
            setting(args, "noise_for") == "sum",
            trainer.accelerator.scaler is not None,
        )


class HookedTraining(NamedTuple):
    """A hook in a training, which the rules `HOOKS` look at.

    Args:
        hook: The hook, on the model.
        differentiation: The way gradients are made.
        is_sharded: Whether a device holds a part of the model.
        is_withheld: Whether the hook is on a parameter that no message is of.
    """

    hook: Hook
    differentiation: Differentiation
    is_sharded: bool
    is_withheld: bool

    @property
    def values(self) -> dict[str, object]:
        """The values of what stands in braces in the rules' texts."""
        return {"hook": f"{self.hook.call} ({self.hook.place})"}


def check_hooks(
    model: nn.Module,
    hooks: Iterable[Hook],
    differentiation: Differentiation,
    shared_names: Collection[str],
) -> None:
    """Refuse hooks that would not run as in a plain training.

    Args:
        model: The bare model.
        hooks: The hooks on it.
        differentiation: The way gradients are made.
        shared_names: The names of the parameters that messages are of.

    Raises:
        UnsupportedError: If there is such a hook, with the reason and the way out.

    Example:
        >>> names = [name for name, _ in model.named_parameters()]
        >>> handle = model.classifier.bias.register_hook(lambda slope: slope.clamp(max=1))
        >>> plain = Differentiation(make_defense("gaussian_noise"))
        >>> check_hooks(model, hooks_of(model), plain, names)  # noise is added to what it returns
        >>> settings = {"per_sample": True, "noise_multiplier": 1.0, "delta": 1e-3}
        >>> apart = Differentiation(make_defense("dp_sgd", **settings))
        >>> check_hooks(model, hooks_of(model), apart, names)
        Traceback (most recent call last):
        hf_gradguard.training.refusals.UnsupportedError: ... (classifier.bias) with ...
        >>> handle.remove()
    """
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    for hook in hooks:
        is_withheld = hook.place in trainable and hook.place not in shared_names
        refuse(HOOKS, HookedTraining(hook, differentiation, is_sharded(model), is_withheld))
    if differentiation.defense.facts.needs_samples and packs_tensors():
        raise refusal("saved-tensors-hooks")


def hooks_of(model: nn.Module) -> list[Hook]:
    """Find the hooks that see gradients: on a model's parameters, on its modules, on all modules.

    Example:
        >>> handle = model.classifier.register_full_backward_hook(lambda *_: None)
        >>> [(hook.call, hook.place) for hook in hooks_of(model)]
        [('Module.register_full_backward_hook', 'classifier')]
        >>> handle.remove()
    """
    hooks: list[Hook] = []
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            hooks += _hooks_of_parameter(name, parameter)
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            hooks += hooks_of_module(module, name or "the model")
    functions = every_module._global_backward_hooks, every_module._global_backward_pre_hooks
    is_full = every_module._global_is_full_backward_hook
    call = "torch.nn.modules.module.register_module"
    return hooks + list(_hooks_of_modules(call, "every module", is_full, *functions))


def hooks_of_module(module: nn.Module, place: str) -> Iterator[Hook]:
    """Find the hooks of one module that see gradients.

    Example:
        >>> list(hooks_of_module(model, "the model"))
        []
    """
    functions = module._backward_hooks, module._backward_pre_hooks
    return _hooks_of_modules("Module.register", place, module._is_full_backward_hook, *functions)


def check_free_of_hooks(model: nn.Module) -> None:
    """Refuse an audit of a model with hooks that see gradients.

    Raises:
        UnsupportedError: If there is one, with the reason and the way out.

    Example:
        >>> check_free_of_hooks(model)
    """
    for hook in hooks_of(model):
        raise refusal("hook-in-audit", hook=f"{hook.call} ({hook.place})")


def _hooks_of_parameter(name: str, parameter: nn.Parameter) -> Iterator[Hook]:
    for function in (parameter._backward_hooks or {}).values():
        if getattr(function, "__module__", "") == "torch.autograd.graph":
            yield Hook("torch.autograd.graph.register_multi_grad_hook", name, "step", "torch")
        else:
            yield Hook("Tensor.register_hook", name, "slopes", _package(function))
    for function in (parameter._post_accumulate_grad_hooks or {}).values():
        call = "Tensor.register_post_accumulate_grad_hook"
        yield Hook(call, name, "sum", _package(function))


def _hooks_of_modules(
    call: str, place: str, is_full: bool | None, functions: Any, functions_before: Any
) -> Iterator[Hook]:
    for function in functions.values():
        kind = "_full_backward_hook" if is_full else "_backward_hook"
        yield Hook(call + kind, place, "slopes", _package(function))
    for function in functions_before.values():
        yield Hook(f"{call}_full_backward_pre_hook", place, "slopes", _package(function))


def _package(function: Callable[..., Any]) -> str:
    function = getattr(function, "func", function)  # of functools.partial
    return str(getattr(function, "__module__", "")).split(".")[0]


def hooks_of_accumulation(model: nn.Module) -> list[Hook]:
    """Find hooks on the steps of autograd that add to a parameter's `.grad`.

    Example:
        >>> step = torch.autograd.graph.get_gradient_edge(model.classifier.bias).node
        >>> handle = step.register_hook(lambda *_: None)
        >>> [(hook.call, hook.place) for hook in hooks_of_accumulation(model)]
        [('torch.autograd.graph.Node.register_hook', 'classifier.bias')]
        >>> handle.remove()
    """
    hooks = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        step = get_gradient_edge(parameter).node
        for kind in ("register_hook", "register_prehook"):
            # Nothing lists a step's hooks, but a handle of one refers to all of them.
            handle = getattr(step, kind)(lambda *_: None)
            if len(handle.hooks_dict_ref()) > 1:
                hooks.append(Hook(f"torch.autograd.graph.Node.{kind}", name, "step", ""))
            handle.remove()
    return hooks


def packs_tensors() -> bool:
    """Say whether a context packs what autograd saves for the way back.

    Example:
        >>> with torch.autograd.graph.save_on_cpu():
        ...     packs_tensors()
        True
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@torch.no_grad()
def run_hooks_on_sums(parameters: Iterable[nn.Parameter]) -> None:
    """Run the hooks that wait until a gradient was added to `.grad`, in the order of a way back.

    Args:
        parameters: The parameters whose `.grad` was added to, in the model's order.

    Raises:
        UnsupportedError: If a hook takes `.grad` away or writes to the parameter, as optimizers
            within the backward pass do.

    Example:
        >>> bias = nn.Parameter(torch.zeros(2))
        >>> handle = bias.register_post_accumulate_grad_hook(lambda bias: bias.grad.clamp_(max=1))
        >>> bias.grad = torch.tensor([0.5, 2.0])
        >>> run_hooks_on_sums([bias])
        >>> bias.grad
        tensor([0.5000, 1.0000])
    """
    for parameter in reversed(list(parameters)):
        for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
            writes = parameter._version
            hook(parameter)
            if parameter.grad is None or parameter._version != writes:
                raise refusal("hook-that-steps")
