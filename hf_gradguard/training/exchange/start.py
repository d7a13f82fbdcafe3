"""The agreement of ranks before training, on settings, parameters and weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any
from weakref import WeakSet

import torch
from accelerate.utils import broadcast, gather
from torch import Tensor, nn
from transformers import TrainerState, TrainingArguments
from transformers.utils import logging

from ...defenses import Defense
from ...gradient_map.parameters import is_sharded
from ...leakage.received import ADVICE, check_received
from ..config import setting
from ..refusals import check_loader
from .own_settings import compared_settings

ALONE = (
    "There is one process, so nothing leaves it: this trains as protected clients would, and hides "
    "nothing from anybody here. Start a process for each client (accelerate launch): docs/train.md."
)
_MOST = 10  # findings are listed; the warning counts the others

logger = logging.get_logger(__name__)


def check_agreed(settings: Mapping[str, Any], device: torch.device | str) -> None:
    """Check that all ranks have the same settings. All ranks must call it.

    Ranks that differ would wait for each other, send what does not fit together, or mix up whose
    data is whose.

    Args:
        settings: The settings that `agreed_upon` lists. Ranks send an 8-byte hash of each, which
            does not hide a small number.
        device: The device that ranks exchange from.

    Raises:
        ValueError: If ranks differ; the message names the settings.

    Example:
        >>> check_agreed({"max_steps": 3}, "cpu")
    """
    hashes = torch.frombuffer(
        bytearray(b"".join(map(_hashed, settings.values()))), dtype=torch.int64
    )
    everyone = gather(hashes.to(device)).view(-1, len(hashes))
    if differ := [
        name
        for name, same in zip(settings, (everyone == everyone[0]).all(0), strict=True)
        if not same
    ]:
        raise ValueError(f"Ranks differ in {differences(differ)}")


def _hashed(value: Any) -> bytes:
    return hashlib.blake2b(repr(value).encode(), digest_size=8).digest()


_PLANTED = (
    "Rank 0 starts from another model than this rank has loaded: {} of {} tensors differ, and rank "
    "0's were taken. Weights can be made so that gradients give away their data. If every rank was "
    "to load the same checkpoint (and to make new heads under one seed), stop here."
)


def _digest(tensor: Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(plain.numpy().tobytes(), digest_size=16).digest()


def say_received(model: nn.Module) -> None:
    """Warn if a model that this rank received has properties that make gradients leak.

    Example:
        >>> say_received(model)
    """
    if findings := check_received(model):
        listed = "".join(f"\n- {finding}" for finding in findings[:_MOST])
        unlisted = f"\n- and {len(findings) - _MOST} more" if len(findings) > _MOST else ""
        logger.warning(f"In the model that this rank received:{listed}{unlisted}\n{ADVICE}")


_TRAINED: WeakSet[nn.Module] = WeakSet()


class StartAlike:
    """A callback that starts all ranks with the same settings, and with rank 0's weights.

    Wrapping in DDP would have sent the same parameters and buffers. Rank 0 could plant weights that
    make gradients leak. So a rank warns if rank 0's model differs from the one that it has loaded,
    and checks the model that it got.

    Args:
        evaluated: A function that returns the data that the model is evaluated on.
        defense: A function that returns the defense of the messages.
    """

    def __init__(
        self,
        evaluated: Callable[[], Any] = lambda: None,
        defense: Callable[[], Defense | None] = lambda: None,
    ) -> None:
        self._started, self._evaluated, self._defense = False, evaluated, defense

    def on_train_begin(
        self, args: TrainingArguments, state: Any = None, *_: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        if args.world_size > 1:
            trained = kwargs.get("optimizer"), kwargs.get("train_dataloader")
            check_loader(trained[1])  # a user's own class may have made it
            measured = self._evaluated(), self._defense()
            settings = agreed_upon(args, model, state, *trained, *measured)
            check_agreed(settings, args.device)
            if not is_sharded(model):  # a sharded model was aligned before it was cut
                self.align(args, model)
        self._started = True
        _TRAINED.add(model)

    def align(self, args: TrainingArguments, model: nn.Module) -> None:
        """Take rank 0's parameters and buffers, and warn if they differ. All ranks must call it.

        Args:
            args: The training arguments.
            model: The model as this rank has loaded it, whole.
        """
        # After a training, buffers hold statistics of rank 0's data, so only parameters are sent.
        buffers = [] if model in _TRAINED else list(model.buffers())
        tensors = [tensor.detach() for tensor in (*model.parameters(), *buffers)]
        compared = [] if self._started else tensors
        digests = list(map(_digest, compared))
        with torch.no_grad():
            for tensor in tensors:
                sent = tensor.to(args.device)
                broadcast(sent)
                if sent is not tensor:  # Accelerate moves a model that it is to cut later
                    tensor.copy_(sent)
        pairs = zip(digests, map(_digest, compared), strict=True)
        if args.process_index and not self._started and setting(args, "check_received"):
            say_received(model)
        if num_different := sum(sent != received for sent, received in pairs):
            logger.warning(_PLANTED.format(num_different, len(tensors)))


_OF_OPTIMIZER = (
    "optim", "optim_args", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "warmup_steps", "warmup_ratio",
)  # fmt: skip
"""Settings that decide the optimizer."""
_OF_CLIENTS = (
    "clients_per_process", "per_device_train_batch_size", "partition", "dirichlet_alpha",
)  # fmt: skip
"""Settings that must be equal on ranks that hold parts of one federation, or of one sum."""
EVALUATED, BEGUN = "per_device_eval_batch_size", "the step that training begins at"
STEPS, BATCHES = "the number of steps", "the number of batches in an epoch"
ROWS, OPTIMIZER = "the number of rows to evaluate on", "the optimizer and its rates"
PARAMETERS = "the model's parameters, and which of them are trained"
SUMMED = "the defense or its settings, whose noise is of the sum (noise_for='sum')"


def agreed_upon(
    args: TrainingArguments,
    model: nn.Module,
    state: TrainerState | None = None,
    optimizer: Any = None,
    batches: Any = None,
    evaluated: Any = None,
    defense: Defense | None = None,
) -> dict[str, Any]:
    """List what must be the same on all ranks, by name.

    The list has all settings but those that a rank may choose for itself (own_settings.py). A limit
    counts only by whether it stops a run. An interval, or a length of data, counts only if
    exchanges follow it.

    Args:
        args: The training arguments.
        model: The model that is trained.
        state: The state of the training that begins.
        optimizer: The training's optimizer.
        batches: The training's data loader.
        evaluated: The data that the model is evaluated on, if it is.
        defense: The defense of this rank's messages. It counts if the messages are parts of one
            sum: the sum's noise is what all ranks add, so a rank that adds less weakens all others'
            protection.

    Example:
        >>> agreed_upon(TrainingArguments("out", max_steps=3), model)["max_steps"]
        3
    """
    settings = compared_settings(args)
    limited = setting(args, "leakage_limit") is not None
    settings["leakage_action"] = setting(args, "leakage_action") if limited else None
    settings |= _intervals(args)
    draws_together = settings["num_clients"] is not None
    for name in _OF_CLIENTS:
        of_sum = settings["noise_for"] == "sum" and name == "clients_per_process"
        settings[name] = getattr(args, name, None) if draws_together or of_sum else None
    seeds = getattr(args, "data_seed", None), getattr(args, "seed", None)
    settings["data_seed"] = (
        next(seed for seed in (*seeds, 0) if seed is not None) if draws_together else 0
    )
    settings[BEGUN] = getattr(state, "global_step", None)
    counted = state is not None and (settings["max_steps"] or 0) <= 0
    settings[STEPS] = state.max_steps if counted and state is not None else None
    settings[BATCHES] = _length(batches) if _follows_epochs(settings, batches) else None
    evaluates = _evaluates(settings)
    settings[ROWS] = _lengths(evaluated) if evaluates else None
    settings[EVALUATED] = args.per_device_eval_batch_size if evaluates else None
    parameters = [
        (name, tuple(p.shape), str(p.dtype), p.requires_grad)
        for name, p in model.named_parameters()
    ]
    settings[PARAMETERS] = parameters
    settings[SUMMED] = None
    if defense is not None and settings["noise_for"] == "sum":
        settings[SUMMED] = defense.name, defense.settings()
    settings[OPTIMIZER] = None if optimizer is None else _described(optimizer)
    return settings


def differences(names: Iterable[str]) -> str:
    """Return the end of an error's text: the entries of `agreed_upon` that differ, and advice.

    An entry that follows from another is left out.

    Args:
        names: The names of the entries that differ.

    Example:
        >>> differences(["learning_rate", OPTIMIZER])
        'learning_rate, so nothing was trained. Start every rank with the same settings ...'
    """
    names = list(names)
    if not {PARAMETERS, *_OF_OPTIMIZER}.isdisjoint(names):
        names = [name for name in names if name != OPTIMIZER]
    return f"{', '.join(names)}, so nothing was trained. {_ways_out(set(names))}"


def _ways_out(names: set[str]) -> str:
    advice = ["Start every rank with the same settings and the same model, frozen alike."]
    if names & {STEPS, BATCHES}:
        advice.append(
            "Where ranks have data sets of their own, of different lengths, give all the same "
            "max_steps, and log, save and evaluate by steps, not by epochs; leave "
            "use_seedable_sampler as it is. Or give all as many rows and the same batch size."
        )
    if BEGUN in names:
        advice.append("Resume every rank from the checkpoint of the same step, or none.")
    if ROWS in names:
        advice.append("Evaluate on data of the same length on every rank.")
    return " ".join(advice)


def _intervals(args: TrainingArguments) -> dict[str, Any]:
    intervals = {}
    for event in ("logging", "save", "eval"):
        by_steps = getattr(args, f"{event}_strategy", None) == "steps"
        intervals[f"{event}_steps"] = getattr(args, f"{event}_steps", None) if by_steps else None
    delayed = getattr(args, "eval_strategy", "no") != "no"
    return intervals | {"eval_delay": getattr(args, "eval_delay", None) if delayed else None}


def _evaluates(settings: dict[str, Any]) -> bool:
    return bool(settings["eval_on_start"]) or (settings["eval_strategy"] or "no") != "no"


def _follows_epochs(settings: dict[str, Any], batches: Any) -> bool:
    """Return whether ranks exchange something for each batch, or at an epoch's start or end.

    At its start they send a sampler's random state.
    """
    strategies = [settings[f"{event}_strategy"] for event in ("logging", "save", "eval")]
    counts = (settings["include_num_input_tokens_seen"] or "no") != "no"
    accumulates = (settings["gradient_accumulation_steps"] or 1) > 1
    at_start = bool(getattr(batches, "rng_types", None))
    return "epoch" in strategies or at_start or (counts and accumulates)


def _length(data: Any) -> int | None:
    try:
        return len(data) if isinstance(data, Sized) else None
    except TypeError:  # a loader of rows without a length
        return None


def _lengths(data: Any) -> Any:
    if isinstance(data, dict):
        return [(name, _length(loader)) for name, loader in data.items()]
    return _length(data)


def _described(optimizer: Any) -> Any:
    """Return an optimizer's class, and each group's settings and number of parameters."""
    plain = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
    groups = [sorted(_settings(group)) for group in getattr(plain, "param_groups", [])]
    return type(plain).__name__, groups


def _settings(group: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in group.items():
        if name in ("params", "param_names"):
            value = len(value)
        yield name, repr(value.tolist() if isinstance(value, Tensor) else value)


def log_ranks(ranks: int, state: TrainerState) -> None:
    """Log on rank 0 how many ranks train. A rank that is alone is warned once.

    Args:
        ranks: The number of ranks.
        state: The state of the training.

    Example:
        >>> from transformers import TrainerState
        >>> log_ranks(2, TrainerState())
    """
    if not state.is_world_process_zero:
        return
    if ranks == 1:
        logger.warning_once(ALONE)
    else:
        logger.info(f"{ranks} ranks share protected gradients.")
