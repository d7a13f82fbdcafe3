"""`GradGuardTrainer`: the Trainer, sharing only protected gradients.

The stock Trainer wraps the model in DDP, whose backward pass averages gradients over ranks as it
goes. Here the model is never wrapped, so nothing in the process exchanges gradients by itself:
every rank differentiates its own loss, protects the result, and averages what is protected by hand.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.utils import logging

from ..defenses import DEFENSES, Defense, Message, make_defense
from ..gradient_map import GradientMap, Tensors
from ..gradient_map.inputs import shared_parameters
from ..leakage import FisherAccountant
from ..randomness import private_generator, seeded_generator
from .batch_statistics import average_statistics, freeze_statistics, warn_of_statistics
from .card import add_privacy_section
from .checks import check_accelerator, check_arguments, check_leakage, check_model
from .clients import CLIENT, SHARE, ClientCollator, ClientRows, ClientSampler, make_partition
from .config import GradGuardConfig
from .exchange import average
from .loading import RenamedWeightsTrainer, load_model, load_tokenizer
from .meter import LeakageMeter
from .private_state import load_private_state, save_private_state

logger = logging.get_logger(__name__)


class GradGuardTrainer(RenamedWeightsTrainer):
    """Drop-in `Trainer` in which each rank's local gradient is replaced by a protected one before
    anything is exchanged.

    Args:
        model: As for `Trainer`. May be left out, also by passing `args` first: then
            `args.model_name_or_path` is loaded.
        args: `GradGuardConfig` or plain `TrainingArguments`.
        defense: A name of `DEFENSES` (its settings come from `args.defense_kwargs`) or a `Defense`.
            Required here or in `args`.
        accountant: Gets the dFIL of every example that this rank shares something about, and is
            checkpointed with it.
        **kwargs: All other arguments of `Trainer`.

    Logs `defense/relative_error` (‖shared - g‖/‖g‖), `defense/cosine` and `defense/seconds` (per
    message, on top of the plain gradient) beside the loss, and beside the summary of a training
    that ends before the next log. They are rank 0's own, means over its messages since the last
    log.

    With `leakage_logging_steps=n` every n-th step also logs `leakage/dfil_mean`,
    `leakage/dfil_max`, `leakage/mse_bound` (of the sample that leaks most) and
    `leakage/i2f_lower_bound` of what is about to be shared. Every rank keeps its own in its
    `state.log_history`; what is reported or saved is rank 0's. See `docs/estimators.md`.

    Each client's micro-batch is one message, protected by itself; accumulation, averaging over
    ranks, clipping and the optimizer only process messages that are protected. Noise is added to
    the gradient of the client's *mean* loss.

    Raises:
        ValueError: If no defense is named, or one is named twice.
        NotImplementedError: For set-ups that cannot be protected; see `checks.py`.

    Example:
        >>> trainer = GradGuardTrainer(model, GradGuardConfig(output_dir="out"), defense="optimal_noise", train_dataset=data)
        >>> trainer.train()
    """

    def __init__(
        self,
        model: PreTrainedModel | nn.Module | TrainingArguments | None = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        defense: str | Defense | None = None,
        accountant: FisherAccountant | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(model, TrainingArguments):
            model, args = args, model
        args = args or GradGuardConfig(output_dir="tmp_trainer")
        check_arguments(args)
        self.defense = _resolve_defense(defense, args)
        if model is None and kwargs.get("model_init") is None:
            model = load_model(args)
            if kwargs.get("processing_class") is None and len(positional) < 4:
                kwargs["processing_class"] = load_tokenizer(args)
        super().__init__(model, args, *positional, **kwargs)
        check_model(self.model)
        check_accelerator(self.accelerator, self.train_dataset)
        own_batches = type(self).get_train_dataloader is not GradGuardTrainer.get_train_dataloader
        check_leakage(args, self.defense, accountant, own_batches)
        self.defense.prepare(self.model, self.processing_class)
        # "Evaluation mode" is Accelerate's word for preparing a model (device, autocast) without
        # wrapping it in DDP.
        self.accelerator.prepare_model = functools.partial(
            self.accelerator.prepare_model, evaluation_mode=True
        )
        self.add_callback(_StartAlike())
        self._share_input_embeddings = getattr(args, "share_input_embeddings", False)
        self._batch_statistics: str = getattr(args, "batch_statistics", "local")
        if self.is_world_process_zero():
            warn_of_statistics(self.model, self._batch_statistics)
        self.shared_names = list(shared_parameters(self.model, self._share_input_embeddings))
        self._parts = self._partition()
        hosted = len(self._parts) // self.accelerator.num_processes or getattr(
            args, "clients_per_process", 1
        )
        self._clients = [copy.deepcopy(self.defense) for _ in range(hosted)]
        self._noise_seed: int | None = getattr(args, "noise_seed", None)
        if self._noise_seed is None:
            self._generator, self._probes = (
                private_generator(args.device),
                private_generator(args.device),
            )
        else:
            logger.warning(
                f"UNSAFE: noise_seed={self._noise_seed} makes all noise reproducible by anybody "
                "who knows it. Leave it out wherever the data matters."
            )
        self._messages = (-1, 0)  # the optimizer step, and how many messages of it were drawn for
        self._divides_by_items: bool | None = None
        self._meter = LeakageMeter(args, self.defense, accountant)
        self._defense_metrics: dict[str, list[float]] = defaultdict(list)

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """One micro-batch: differentiate, protect and accumulate locally; average over ranks when a
        step is due.
        """
        self._train_mode(model)
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        module = self.accelerator.unwrap_model(model)
        inputs = dict(self._prepare_inputs(inputs))
        if CLIENT in inputs:
            clients, batches, weights = self._drawn_clients(inputs, num_items_in_batch is not None)
        else:
            clients, batches = self._clients, _split(inputs, len(self._clients))
            weights = self._weights(module, batches, num_items_in_batch)
        losses = [
            weight * self._share(module, defense, batch, weight, num_items_in_batch is not None)
            for defense, batch, weight in zip(clients, batches, weights, strict=True)
            if weight
        ]
        steps = self.args.torch_empty_cache_steps
        if steps is not None and self.state.global_step % steps == 0:
            clear_device_cache()
        if self.accelerator.sync_gradients:
            self._average_over_ranks(module)
            if self._meter.stops:
                self._stop_together()
            if self._batch_statistics == "shared":
                average_statistics(module, self.accelerator)
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self.args.device)

    def _train_mode(self, model: nn.Module) -> None:
        model.train()
        if self._batch_statistics == "frozen":
            freeze_statistics(model)

    def _share(
        self,
        module: nn.Module,
        defense: Defense,
        batch: dict[str, Any],
        weight: float,
        counts_items: bool,
    ) -> Tensor:
        """Add one client's protected gradient, times its weight, to `.grad`. Returns its mean
        loss.
        """
        step = self.state.global_step
        measured = self._meter.measures(step)
        gmap = GradientMap(
            module,
            batch,
            loss_fn=lambda module, batch: self._mean_loss(module, batch, counts_items),
            share_input_embeddings=self._share_input_embeddings,
            second_order=defense.needs_jacobian or measured,
        )
        norm = _norm(
            gmap.gradient()
        )  # also waits for the device, so that what follows times the defense alone
        generator, probes = self._message_generators()
        start = time.perf_counter()
        message = defense(gmap, generator)
        self._record(gmap.gradient(), message, norm, start)
        if measured and not self._meter.admits(gmap, message, step, probes):
            return gmap.loss  # nothing is added: to the other ranks it is a gradient of zeros
        with torch.no_grad():
            for name, parameter in gmap.parameters.items():
                part = message[name].to(parameter.dtype) * weight
                parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)
        return gmap.loss

    def _average_over_ranks(self, module: nn.Module) -> None:
        """Replace the shared parameters' `.grad` by the mean over ranks: the only exchange of
        gradients there is.
        """
        parameters = shared_parameters(module, self._share_input_embeddings).values()
        for parameter in (
            parameters
        ):  # every rank reduces the same tensors in the same order, also those it never used
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        average([p.grad for p in parameters if p.grad is not None], self.accelerator)

    def _stop_together(self) -> None:
        """End training on every rank if any has to: a rank that left alone would leave the others
        waiting for it.
        """
        due = torch.tensor(float(self._meter.stop_due), device=self.args.device)
        if float(self.accelerator.reduce(due, reduction="sum")):
            self.control.should_training_stop = True

    # A federation in simulation: `num_clients` clients, of which every step draws some.

    def _partition(self) -> list[np.ndarray]:
        """The rows of each client, nothing without `num_clients`."""
        args, ranks = self.args, self.accelerator.num_processes
        count = getattr(args, "num_clients", None)
        if count is None or self.train_dataset is None:
            return []
        if count % ranks or count // ranks < args.clients_per_process:
            raise ValueError(
                f"num_clients={count} must be a multiple of the {ranks} ranks they live on, and at "
                f"least clients_per_process={args.clients_per_process} of them on each."
            )
        return make_partition(
            self.train_dataset, count, args.partition, args.dirichlet_alpha, self._data_seed()
        )

    def _data_seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def get_train_dataloader(self) -> DataLoader:
        """As in `Trainer`; with `num_clients`, of the clients that each step draws."""
        if not self._parts:
            return super().get_train_dataloader()
        args, ranks = self.args, self.accelerator.num_processes
        own = args.per_device_train_batch_size // args.clients_per_process
        return self._get_dataloader(
            dataset=ClientRows(self.train_dataset),
            description="Training",
            batch_size=args.per_device_train_batch_size,
            sampler_fn=lambda _: ClientSampler(
                self._parts, args.clients_per_process, own, ranks, self._data_seed()
            ),
            is_training=True,
        )

    def _get_collator_with_removed_columns(
        self, data_collator: Any, description: str | None = None
    ) -> Any:
        collate = super()._get_collator_with_removed_columns(data_collator, description)
        return ClientCollator(collate) if self._parts and description == "Training" else collate

    def _drawn_clients(
        self, inputs: dict[str, Any], counts_items: bool
    ) -> tuple[list[Defense], list[dict[str, Any]], list[float]]:
        """The clients of a batch, what is theirs of it, and the factors of their mean losses:
        n_k/Σn over all ranks.
        """
        numbers, shares = inputs.pop(CLIENT), inputs.pop(SHARE)
        ranks = (
            self.accelerator.num_processes
        )  # ranks are averaged, and accumulated steps added up, later
        clients, batches, weights = [], [], []
        for number in numbers.unique():
            index = (numbers == number).nonzero().flatten()
            batch = _take(inputs, index, len(numbers))
            clients.append(self._clients[int(number) // ranks])
            batches.append(batch)
            share = (
                0.0 if counts_items and not self._count_items(batch) else float(shares[index[0]])
            )
            weights.append(share * ranks / self.current_gradient_accumulation_steps)
        return clients, batches, weights

    # What the Trainer would have weighed the loss with. Noise scales and bounds speak of the
    # gradient of a client's mean loss, so the weight is taken out before protection and applied
    # after.

    def _mean_loss(self, module: nn.Module, batch: dict[str, Any], counts_items: bool) -> Tensor:
        """The client's mean loss: the Trainer's own, normalized by the client's items."""
        items = (
            torch.tensor(self._count_items(batch), device=self.args.device)
            if counts_items
            else None
        )
        with self.compute_loss_context_manager():
            loss = self.compute_loss(module, dict(batch), num_items_in_batch=items)
        return loss / self._rank_factor(counts_items)

    def _weights(
        self,
        module: nn.Module,
        batches: list[dict[str, Any]],
        num_items_in_batch: Tensor | int | None,
    ) -> list[float]:
        """The factor that the stock Trainer would have given each client's mean loss."""
        if num_items_in_batch is None:
            sizes = [len(_main_input(batch)) for batch in batches]
        else:
            sizes = [self._count_items(batch) for batch in batches]
        whole = float(sum(sizes))
        if num_items_in_batch is not None and whole:
            fullest = batches[max(range(len(sizes)), key=sizes.__getitem__)]
            if self._loss_divides_by_items(module, fullest):
                whole = float(num_items_in_batch)
        factor = self._rank_factor(num_items_in_batch is not None)
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            accepts = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = accepts or self.compute_loss_func is not None
        if not scaled:
            factor /= self.current_gradient_accumulation_steps
        return [size * factor / whole if size else 0.0 for size in sizes]

    def _rank_factor(self, counts_items: bool) -> float:
        """`compute_loss` multiplies a loss that is normalized over all ranks, since ranks are
        averaged later.
        """
        applies = counts_items and (
            self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        )
        return (
            float(self.accelerator.num_processes)
            if applies and self.args.average_tokens_across_devices
            else 1.0
        )

    def _count_items(self, batch: dict[str, Any]) -> int:
        """Labels that count toward the loss, as the Trainer counts them."""
        labels = batch.get("shift_labels")
        if labels is None:
            labels = batch["labels"][..., 1:] if self._loss_shifts_labels else batch["labels"]
        return int(labels.ne(-100).sum())

    def _loss_divides_by_items(self, module: nn.Module, batch: dict[str, Any]) -> bool:
        """Whether the loss is a sum over `num_items_in_batch`. Some models accept that argument and
        take their own mean.
        """
        if self._divides_by_items is None:
            # no dropout and no batch statistics: the global generator and the buffers stay as they
            # are
            module.eval()
            with torch.no_grad():
                one, two = (
                    float(
                        self.compute_loss(
                            module,
                            dict(batch),
                            num_items_in_batch=torch.tensor(n, device=self.args.device),
                        )
                    )
                    for n in (1, 2)
                )
            self._train_mode(module)
            if not one or not abs(one) < float("inf"):
                # a vanishing loss cannot tell, and one that is not finite is refused later
                return False
            if min(abs(one / two - 1), abs(one / two - 2)) > 1e-3:
                raise NotImplementedError(
                    f"The loss changes by a factor of {two / one:g} when num_items_in_batch "
                    "doubles. It has to halve (a sum divided by it) or to stay (a mean that "
                    "ignores it): change compute_loss_func or compute_loss."
                )
            self._divides_by_items = abs(one / two - 2) <= 1e-3
        return self._divides_by_items

    def _message_generators(self) -> tuple[torch.Generator, torch.Generator]:
        """Of the noise, and of the leakage meter's probes: measuring a message must not change its
        noise.
        """
        if self._noise_seed is None:
            return self._generator, self._probes
        step, count = self._messages
        count = count + 1 if step == self.state.global_step else 0
        self._messages = (self.state.global_step, count)
        rank = self.accelerator.process_index
        seeds = (self._noise_seed, rank, self.state.global_step, count)
        return seeded_generator(self.args.device, *seeds), seeded_generator(
            self.args.device, *seeds, 1
        )

    def _record(self, gradient: Tensors, message: Message, norm: float, start: float) -> None:
        size = _norm(message)
        self._defense_metrics["defense/seconds"].append(time.perf_counter() - start)
        if norm:
            error = _norm({name: message[name] - gradient[name] for name in gradient})
            self._defense_metrics["defense/relative_error"].append(error / norm)
            if size:
                inner = sum(
                    float(torch.dot(gradient[name].flatten(), message[name].flatten()))
                    for name in gradient
                )
                # Sums in float32 can end just outside.
                cosine = max(-1.0, min(1.0, inner / (norm * size)))
                self._defense_metrics["defense/cosine"].append(cosine)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As in `Trainer`, with the defense's figures beside the training loss, and the last ones
        beside the summary.
        """
        if "loss" in logs or "train_loss" in logs:
            figures = {
                name: sum(values) / len(values) for name, values in self._defense_metrics.items()
            }
            self._defense_metrics.clear()
            figures |= self._meter.take() | self._meter.take_skipped()
            if "loss" in logs or any(
                figures.values()
            ):  # beside the summary only if something came since the last log
                logs.update(figures)
        super().log(logs, *args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # Before a checkpoint of the same step, so that it holds them; where the loss is logged they
        # stand beside it.
        if not self.control.should_log and (figures := self._meter.take()):
            self.log(figures)
        super()._maybe_log_save_evaluate(*args, **kwargs)

    @property
    def accountant(self) -> FisherAccountant | None:
        """What this rank has shared about each of its examples. Private to the rank."""
        return self._meter.accountant

    def mean_leakage(self) -> dict[str, float]:
        """Means over ranks of the `leakage/dfil_mean` and `leakage/i2f_lower_bound` that each
        logged last.

        Every rank has to call it, and by that sends its figures out: nothing else does. The sum is
        taken by the ranks themselves, so a peer that carries messages sees some of its parts.

        Raises:
            NotImplementedError: On two ranks, where each would learn the other's figures from the
                mean and its own.
        """
        if self.accelerator.num_processes == 2:
            raise NotImplementedError(
                "On two ranks the mean and a rank's own figures give away the other's. Ask each "
                "client for what it wants to tell, or aggregate over three and more."
            )
        names = ("leakage/dfil_mean", "leakage/i2f_lower_bound")
        own = torch.tensor(
            [self._meter.last.get(name, math.nan) for name in names], device=self.args.device
        )
        means = self.accelerator.reduce(own, reduction="mean").tolist()
        return {name: mean for name, mean in zip(names, means, strict=True) if not math.isnan(mean)}

    # What a defense remembers belongs in a checkpoint: a run that is killed and resumed goes on as
    # if it had not been.

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        save_private_state(
            output_dir, self.accelerator.process_index, self._clients, self.accountant
        )

    def _load_optimizer_and_scheduler(
        self, checkpoint: str | None
    ) -> None:  # the random state may be left behind
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            rank, device = self.accelerator.process_index, self.args.device
            load_private_state(checkpoint, rank, self._clients, self.accountant, device)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """As in `Trainer`, with a section on what was protected and what was not."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            add_privacy_section(self)


class _StartAlike(TrainerCallback):
    """What wrapping in DDP would have done: every rank starts from rank 0's parameters and
    buffers.
    """

    def __init__(self) -> None:
        self._started = False

    def on_train_begin(
        self, args: TrainingArguments, *_: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        if args.world_size > 1:
            buffers = (
                [] if self._started else list(model.buffers())
            )  # later on they hold statistics of rank 0's data
            with torch.no_grad():
                broadcast([tensor.detach() for tensor in (*model.parameters(), *buffers)])
        self._started = True


def _resolve_defense(defense: str | Defense | None, args: TrainingArguments) -> Defense:
    named, settings = getattr(args, "defense", None), getattr(args, "defense_kwargs", None) or {}
    if defense is not None and named is not None and defense != named:
        raise ValueError(
            f"Two defenses are named: {defense!r} to the Trainer and {named!r} in its arguments. "
            "Give one."
        )
    if isinstance(defense, Defense):
        if settings:
            raise ValueError(
                "A Defense object brings its own settings: leave defense_kwargs empty, or pass the "
                "name."
            )
        return defense
    name = defense if defense is not None else named
    if name is None:
        raise ValueError(
            f"No defense is named. Pass defense=, one of: {', '.join(DEFENSES)}. To train "
            "unprotected, say 'none'."
        )
    return make_defense(name, **settings)


def _main_input(batch: dict[str, Any]) -> Tensor:
    return batch["input_ids"] if "input_ids" in batch else batch["pixel_values"]


def _split(batch: dict[str, Any], parts: int) -> list[dict[str, Any]]:
    """Cut a batch by rows into `parts` clients, the first ones larger by one row where it does not
    divide.
    """
    if parts == 1:
        return [dict(batch)]
    rows = len(_main_input(batch))
    parts_of = torch.arange(rows, device=_main_input(batch).device).tensor_split(parts)
    return [_take(batch, index, rows) for index in parts_of]


def _take(batch: dict[str, Any], index: Tensor, rows: int) -> dict[str, Any]:
    """Some rows of a batch; what is not of one entry a row stays whole."""
    return {
        key: value[index]
        if isinstance(value, Tensor) and value.dim() and len(value) == rows
        else value
        for key, value in batch.items()
    }


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(list(tensors.values())))
