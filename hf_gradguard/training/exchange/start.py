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
_MOST = 10  # findings that are listed

logger = logging.get_logger(__name__)


def check_agreed(settings: Mapping[str, Any], device: torch.device | str) -> None:
    """Check on all ranks that they agree on settings.

    All ranks must call it.

    Exchanges of ranks that differ would not fit together, wait for each other, or mix up what is
    whose.

    Args:
        settings: The settings that `agreed_upon` lists. Ranks send 8 bytes of a hash of each entry,
            which hides no small number.
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
    """Warn of properties of a received model that make gradients leak.

    Example:
        >>> say_received(model)
    """
    if findings := check_received(model):
        listed = "".join(f"\n- {finding}" for finding in findings[:_MOST])
        unlisted = f"\n- and {len(findings) - _MOST} more" if len(findings) > _MOST else ""
        logger.warning(f"In the model that this rank received:{listed}{unlisted}\n{ADVICE}")


_TRAINED: WeakSet[nn.Module] = WeakSet()


class StartAlike:
    """Every rank is asked for the same, and starts, as wrapping in DDP would have made it, from
    rank 0's parameters and buffers.

    Rank 0 could plant weights that make gradients leak. A rank that has loaded a model of its own
    says so where rank 0's is another, and looks at what it got.

    Args:
        evaluated: Gives what the model is evaluated on.
        defense: Gives what messages are protected by.
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
            check_loader(trained[1])  # also of a class of the user's own
            measured = self._evaluated(), self._defense()
            settings = agreed_upon(args, model, state, *trained, *measured)
            check_agreed(settings, args.device)
            if not is_sharded(model):  # that began alike before it was cut
                self.align(args, model)
        self._started = True
        _TRAINED.add(model)

    def align(self, args: TrainingArguments, model: nn.Module) -> None:
        """Take rank 0's parameters and buffers, and say so where they are others. All ranks must
        call it.

        Args:
            args: Training arguments.
            model: As this rank has loaded it, whole.
        """
        # later on buffers hold statistics of rank 0's data, also in another Trainer
        buffers = [] if model in _TRAINED else list(model.buffers())
        tensors = [tensor.detach() for tensor in (*model.parameters(), *buffers)]
        compared = [] if self._started else tensors
        digests = list(map(_digest, compared))
        with torch.no_grad():
            for tensor in tensors:
                sent = tensor.to(args.device)
                broadcast(sent)
                if sent is not tensor:  # of a model that Accelerate is to cut, and moves then
                    tensor.copy_(sent)
        pairs = zip(digests, map(_digest, compared), strict=True)
        if args.process_index and not self._started and setting(args, "check_received"):
            say_received(model)
        if num_different := sum(sent != received for sent, received in pairs):
            logger.warning(_PLANTED.format(num_different, len(tensors)))


# Which make the optimizer
_OF_OPTIMIZER = (
    "optim", "optim_args", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "warmup_steps", "warmup_ratio",
)  # fmt: skip
# Of ranks that hold parts of one federation, or of one sum
_OF_CLIENTS = (
    "clients_per_process", "per_device_train_batch_size", "partition", "dirichlet_alpha",
)  # fmt: skip
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
    """List what has to be the same on all ranks, by name: all settings but those that a rank may
    choose for itself (own_settings.py). Limits count by whether they stop a run, intervals where
    something follows them, and lengths of data where exchanges follow them.

    Args:
        args: Training arguments.
        model: The one that is trained.
        state: Of the training that begins.
        optimizer: Its own.
        batches: Its data loader.
        evaluated: What it is evaluated on, if it is.
        defense: Of this rank's messages. It counts where they are parts of one sum: noise of the
            sum is what all add, and a rank that adds less takes it from all others.

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
    """Return the entries of `agreed_upon` that differ, and what to do.

    Entries that follow from others are left out.

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
    """Whether ranks exchange something at the end of an epoch, at its start (a sampler's random
    state), or for each batch.
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
    """Its class, and of each group how many parameters there are and all that is set for them."""
    plain = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
    groups = [sorted(_settings(group)) for group in getattr(plain, "param_groups", [])]
    return type(plain).__name__, groups


def _settings(group: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in group.items():
        if name in ("params", "param_names"):
            value = len(value)
        yield name, repr(value.tolist() if isinstance(value, Tensor) else value)


def log_ranks(ranks: int, state: TrainerState) -> None:
    """Log how many ranks train, on one for all: warn of one that is alone, once.

    Args:
        ranks: How many there are.
        state: Of the training.

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
