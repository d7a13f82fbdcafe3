"""The measurement of a rank's messages before they are shared.

Figures stay on the rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import TrainingArguments
from transformers.utils import logging

from ..defenses import Defense, Message, Noise
from ..gradient_map import GradientMap
from ..gradient_map.differences import DifferencedMap, by_differences
from ..leakage import (
    DFIL,
    FisherAccountant,
    dfil,
    label_information,
    mse_bound_from_dfil,
    mse_bound_with_prior,
    one_product_bound,
    prior_deviation,
)
from ..leakage.gram import Unknowns
from ..leakage.labels import class_labels
from ..randomness import Stream
from .clients.batches import ROW
from .config import setting

logger = logging.get_logger(__name__)

EXACT_PROBES, PROBES, LABEL_PROBES = 10, 2, 2


class MessageDFIL(NamedTuple):
    """The Fisher information η̄² that a message holds about its batch's input.

    Args:
        samples: The η̄² of every sample, `(B,)`, with its standard error.
        mean: The η̄² of the whole message, Tr J_F/m for m unknown numbers.
    """

    samples: DFIL
    mean: float


def message_dfil(
    gmap: GradientMap,
    noise: Noise,
    num_probes: int | None = None,
    generator: Stream | torch.Generator | None = None,
) -> MessageDFIL:
    """Estimate the diagonal Fisher information leakage (dFIL) of a message, given its noise.

    If the noise's shape depends on the batch, what the shape tells counts as well.

    Args:
        gmap: The message's gradient map, or what `by_differences` makes of it.
        noise: The noise that the message states.
        num_probes: The number of random probes. By default it is 2 by differences, and 10 by exact
            products. Products are exact where differences are not available, or where coordinates
            have no noise: a difference cannot tell what is zero.
        generator: The source of the probes.

    Example:
        >>> noise = make_defense("gaussian_noise", scale=0.1)(gmap).noise
        >>> message_dfil(gmap, noise, num_probes=5).samples.value.shape
        torch.Size([2])
    """
    unknowns, probed = Unknowns(gmap), gmap
    if any((variance == 0).any() for variance in noise.variance.values()):
        probed = gmap.twice()
    elif not isinstance(gmap, DifferencedMap):
        probed = by_differences(gmap) or gmap.twice()
    probes = PROBES if isinstance(probed, DifferencedMap) else EXACT_PROBES
    samples = dfil(probed, noise.variance, num_probes or probes, generator)
    mean = float((samples.value * unknowns.per_sample).sum()) / unknowns.size
    if noise.shape_trace:  # the shape could tell of one sample alone
        added = noise.shape_trace / unknowns.per_sample
        samples = samples._replace(value=samples.value + added)
    return MessageDFIL(samples, mean + noise.shape_trace / unknowns.size)


class LeakageMeter:
    """A meter that measures messages, and says which messages must not be shared.

    It keeps the figures of a step for the log.

    Args:
        args: The training arguments, whose settings `leakage_*` the meter follows.
        defense: The defense of the messages.
        accountant: The accountant that adds up each example's dFIL over all shared messages.
        write: The function that writes down each release before it is shared.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> defense = make_defense("gaussian_noise", scale=0.1)
        >>> meter = LeakageMeter(GradGuardConfig("out", leakage_logging_steps=1), defense, None)
        >>> meter.admits(gmap, defense(gmap), step=0, generator=Stream())
        True
        >>> sorted(meter.pop_metrics())[0]
        'leakage/dfil_max'
    """

    def __init__(
        self,
        args: TrainingArguments,
        defense: Defense,
        accountant: FisherAccountant | None,
        write: Callable[[Mapping[str, Any]], object] | None = None,
    ) -> None:
        self.accountant, self._write = accountant, write
        self._logging_steps: int = setting(args, "leakage_logging_steps")
        self._limit: float | None = setting(args, "leakage_limit")
        self._num_probes: int | None = setting(args, "leakage_num_probes")
        self._stops = self._limit is not None and setting(args, "leakage_action") == "stop"
        self._has_dfil = defense.facts.adds_gaussian_noise
        self._binding = accountant is not None or self._limit is not None
        self._stop_due = False
        self._metrics: dict[str, list[float]] = defaultdict(list)
        self._prior_precisions: list[float] = []
        self._skipped = 0
        if self._logging_steps and not self._has_dfil:
            logger.warning_once(
                f"{defense.name} adds no Gaussian noise of known covariance to the true gradient, "
                "so what it shares has no dFIL and no bound on the MSE: of the leakage figures "
                "only leakage/i2f_lower_bound is logged."
            )

    @property
    def stops(self) -> bool:
        """Whether ranks have to agree at every step on whether to continue."""
        return self._stops

    def pop_stop(self) -> bool:
        """Return whether a message was below the limit since the last call.

        The meter then forgets it, so that the next training does not stop for it.
        """
        due, self._stop_due = self._stop_due, False
        return due

    def logs(self, step: int) -> bool:
        """Return whether the figures of a step are logged, given the number of finished steps."""
        return bool(self._logging_steps) and (step + 1) % self._logging_steps == 0

    def measures(self, step: int) -> bool:
        """Return whether messages of that step are measured at all."""
        return self.logs(step) or self._binding

    def admits(
        self,
        gmap: GradientMap,
        message: Message,
        step: int,
        generator: Stream | torch.Generator,
        rows: Tensor | None = None,
    ) -> bool:
        """Measure a message that is about to be shared, and return whether it may be.

        Args:
            gmap: The message's gradient map.
            message: The message.
            step: The number of finished optimizer steps.
            generator: The source of the probes.
            rows: The numbers of the message's rows in the data set, `(B,)`; an accountant needs
                them.

        Raises:
            ValueError: If a limit or an accountant needs a dFIL that cannot be computed, or an
                accountant cannot tell whose it is. Nothing is shared then.
            ArithmeticError: If dFIL cannot be computed; nothing is shared then.
        """
        # For the log two products are taken: of one pass at x they share the differences.
        probed = by_differences(gmap) if self.logs(step) else None
        leakage = self._dfil(probed or gmap, message.noise, generator)
        bound = None if leakage is None else mse_bound_from_dfil(float(leakage.samples.value.max()))
        if self.logs(step):
            if leakage is not None and bound is not None:
                self._metrics["leakage/dfil_mean"].append(leakage.mean)
                self._metrics["leakage/dfil_max"].append(float(leakage.samples.value.max()))
                self._metrics["leakage/mse_bound"].append(bound)
                self._prior_precisions.append(prior_deviation(gmap) ** -2)
                self._measure_labels(gmap, message.noise, generator)
            self._measure_influence(probed or gmap.twice(), message)
        if self._limit is not None and bound is not None and bound < self._limit:
            # Ranks agree on stopping after the step: here the others still wait for this one.
            self._skipped += 1
            self._stop_due = self._stops
            logger.warning_once(
                "A message's bound on the MSE was below leakage_limit, so it was not shared. Such "
                "messages count as zero gradients; leakage/skipped in this rank's log says how "
                "many there are."
            )
            return False
        if self.accountant is not None and leakage is not None:
            numbers = _numbers(gmap, rows)
            if self._write is not None:
                release = self.accountant.release(numbers, *leakage.samples)
                self._write({"release": release})
            self.accountant.step(numbers, *leakage.samples)
        return True

    @property
    def metric_counts(self) -> dict[str, int]:
        """The number of messages that each figure of `pop_metrics` is of, by its name."""
        counts = {name: len(values) for name, values in self._metrics.items()}
        return counts | {"leakage/mse_bound_with_prior": len(self._prior_precisions)}

    def pop_metrics(self) -> dict[str, float]:
        """Return the figures since the last call.

        Most are means over messages. `dfil_max` and `mse_bound` are the worst message's, and
        `mse_bound_with_prior` is the bound that follows from the mean information.
        """
        worst = {"leakage/dfil_max": max, "leakage/mse_bound": min}
        figures = {
            name: float(worst[name](values)) if name in worst else sum(values) / len(values)
            for name, values in self._metrics.items()
        }
        if self._prior_precisions:
            # Theorem 3.2 has the expectation in the denominator: the mean of bounds is larger.
            precision = sum(self._prior_precisions) / len(self._prior_precisions)
            bound = mse_bound_with_prior(figures["leakage/dfil_mean"], precision, 1)
            figures["leakage/mse_bound_with_prior"] = bound
        self._metrics.clear()
        self._prior_precisions.clear()
        return figures

    def pop_skipped(self) -> dict[str, float]:
        """Return how many messages the limit withheld since the last call, if there is a limit."""
        if self._limit is None:
            return {}
        skipped, self._skipped = self._skipped, 0
        return {"leakage/skipped": float(skipped)}

    def _dfil(
        self, gmap: GradientMap, noise: Noise | None, generator: Stream | torch.Generator
    ) -> MessageDFIL | None:
        if noise is None:
            if self._binding:
                raise ValueError(
                    "The defense did not say what noise it added, so nothing was shared. A "
                    "`protect` of one's own has to say it in `Message.noise`, or call that of the "
                    "class it extends."
                )
            return None
        try:
            return message_dfil(gmap, noise, self._num_probes, generator)
        except (ValueError, ArithmeticError) as error:
            if self._binding:
                raise
            logger.warning_once(f"dFIL is not logged where it cannot be computed. {error}")
            return None

    def _measure_labels(
        self, gmap: GradientMap, noise: Noise | None, generator: Stream | torch.Generator
    ) -> None:
        if noise is None or class_labels(gmap) is None:
            return
        try:
            information = label_information(
                gmap, noise.variance, num_probes=LABEL_PROBES, generator=generator
            )
        except (ValueError, ArithmeticError):  # the labels are numbers, so there are no classes
            return
        self._metrics["leakage/label_information"].append(information)

    def _measure_influence(self, gmap: GradientMap, message: Message) -> None:
        delta = {name: message[name] - g for name, g in gmap.gradient().items()}
        try:
            self._metrics["leakage/i2f_lower_bound"].append(one_product_bound(gmap, delta))
        except (ValueError, ArithmeticError) as error:
            logger.warning_once(
                f"leakage/i2f_lower_bound is not logged where it cannot be computed. {error}"
            )


def _numbers(gmap: GradientMap, rows: Tensor | None) -> list[int]:
    """Return the data-set rows by which an accountant knows a batch's examples."""
    samples = len(gmap.input)
    if rows is None:
        raise ValueError(
            "The batch does not say which rows of the data set it holds, so the accountant cannot "
            "tell whose leakage it is, and nothing was shared. In an own get_train_dataloader "
            "return `self.loader_of(self.train_dataset, sampler)`, which says it, or let the "
            f"collator add a tensor {ROW!r}, one number per sample."
        )
    if rows.shape != (samples,):
        raise ValueError(
            f"The collator made {samples} sample(s) out of {rows.numel()} row(s) of the data set, "
            "so the accountant cannot tell whose leakage it is, and nothing was shared. Let the "
            f"collator make one sample of each row, or add a tensor {ROW!r} of its own, one number "
            "a sample."
        )
    numbers: list[int] = rows.tolist()
    return numbers
