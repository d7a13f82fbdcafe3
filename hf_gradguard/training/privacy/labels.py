"""Labels that are randomized before anything is computed from them.

Randomized response (Warner, 1965) keeps a label with probability e^ε / (e^ε + K - 1), and otherwise
replaces it by one of the other classes, each equally likely. For K classes it is that of Kairouz,
Oh and Viswanath, "Extremal Mechanisms for Local Differential Privacy", 2014. Anything that is
computed from the result is ε-label differentially private: no message, whatever protects it,
changes the odds of two labels of a row by more than a factor e^ε.

The unit is a row. A text that is in the data k times has k draws, whose ε add up. At ε = 1 an
attacker finds 73.1 % of the labels of single texts, and 93.5 % of those of texts that are there
nine times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from transformers.utils import logging

from ...randomness import Stream
from ..clients.partition import fetched
from ..config import setting
from ..refusals import refusal
from .proofs import NO_EPSILON

logger = logging.get_logger(__name__)

_NAMES = ("labels", "label", "label_ids")


def keep_probability(epsilon: float, classes: int) -> float:
    """Return the probability that randomized response keeps a label.

    If all labels were equally likely before, no attack finds a larger fraction of them.

    Args:
        epsilon: The ε of a label.
        classes: The number K of classes.

    Example:
        >>> round(keep_probability(1.0, classes=2), 3)
        0.731
        >>> keep_probability(0.0, classes=20)
        0.05
    """
    return 1 / (1 + (classes - 1) * math.exp(-epsilon))


def randomized_response(label: int, epsilon: float, classes: int, stream: Stream) -> int:
    """Return a label, drawn once by randomized response.

    Args:
        label: The true class id.
        epsilon: The ε of the label.
        classes: The number K of classes.
        stream: The source of randomness.

    Raises:
        ValueError: If the label is no class.

    Example:
        >>> randomized_response(1, 50.0, classes=2, stream=Stream())
        1
    """
    if not 0 <= label < classes:
        raise ValueError(f"A label must be a class id from 0 to {classes - 1}, but is {label!r}.")
    if float(stream.uniform((), dtype=torch.float64)) < keep_probability(epsilon, classes):
        return label
    drawn_class = int(stream.integers(classes - 1, ()))
    return drawn_class + (drawn_class >= label)


class LabelKey:
    """The private key that decides how a rank's labels are randomized.

    A row's draw is the same at every epoch, so its label is released only once. The key is stored
    in checkpoints.

    Args:
        seed: A seed that makes draws reproducible. They then hide nothing from anybody who knows
            it. By default the key is random.

    Attributes:
        is_from_seed: Whether a seed decides the draws.

    Example:
        >>> key = LabelKey()
        >>> key.load(key.tensor())
    """

    def __init__(self, seed: tuple[int, ...] | None = None) -> None:
        stream = Stream() if seed is None else Stream.from_seeds(*seed)
        self.is_from_seed = seed is not None
        self._key = stream.bytes(32)

    def of(self, row: int) -> Stream:
        """Return the stream that a data-set row's label is drawn from.

        Args:
            row: The row's number.
        """
        return Stream.from_seeds(int.from_bytes(self._key, "big"), row)

    def tensor(self) -> Tensor:
        """Return the key as a tensor, for a checkpoint."""
        return torch.tensor(list(self._key), dtype=torch.uint8)

    def load(self, saved: Tensor) -> None:
        """Load the key that `tensor` returned.

        Args:
            saved: The key as a tensor of bytes.
        """
        self._key = bytes(saved.tolist())


class RandomizedLabels(Dataset):
    """A data set whose labels are drawn by randomized response, once for each row.

    ε is stated for one row. If a text stands in several rows, each has a draw of its own, and their
    ε add up.

    Args:
        data: The rows by number, each a mapping with a class id called `labels` or `label`.
        epsilon: The ε of a label, above 0.
        classes: The number K of classes.
        key: The key of the draws.

    Raises:
        UnsupportedError: If rows have no number, or a row's label is no class id.

    Example:
        >>> rows = [{"labels": 1}, {"labels": 0}]
        >>> RandomizedLabels(rows, 50.0, classes=2, key=LabelKey())[0]
        {'labels': 1}
    """

    def __init__(self, data: Any, epsilon: float, classes: int, key: LabelKey) -> None:
        if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
            raise refusal("labels-of-unnumbered-rows", kind=type(data).__name__)
        self.data, self.epsilon, self.classes, self.key = data, epsilon, classes, key

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._with_label(self.data[index], index)

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        rows = fetched(self.data, indices)
        return [self._with_label(row, index) for row, index in zip(rows, indices, strict=True)]

    def _with_label(self, row: Any, index: int) -> dict[str, Any]:
        names = [name for name in _NAMES if isinstance(row, Mapping) and name in row]
        if len(names) > 1:
            raise refusal("labels-in-two-columns", names=names)
        name = names[0] if names else None
        label = None if name is None else row[name]
        if isinstance(label, Tensor) and label.dim() == 0 and not label.is_floating_point():
            label = int(label)
        if name is None or isinstance(label, bool) or not isinstance(label, int | np.integer):
            value = "missing" if name is None else repr(row[name])[:60]
            raise refusal("labels-of-no-class", value=value)
        place = index % len(self.data) if index < 0 else index
        new = randomized_response(int(label), self.epsilon, self.classes, self.key.of(place))
        true_label = row[name]
        released = torch.full_like(true_label, new) if isinstance(true_label, Tensor) else new
        return {**row, name: released}


def protect_labels(
    data: Any, args: Any, model: nn.Module, key: LabelKey, own_batches: bool
) -> RandomizedLabels | None:
    """Return training data with randomized labels; data that has them already stays as it is.

    Args:
        data: The Trainer's data, if it has any.
        args: The training arguments with `label_epsilon`.
        model: The model that predicts the labels, which says how many classes there are.
        key: The key of the draws.
        own_batches: Whether the Trainer's class reads its batches in its own way.

    Raises:
        UnsupportedError: If labels are no classes, if true labels decide which client gets a row,
            or if batches need not come from `data`.
        ValueError: If the labels were randomized with another ε.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> asked = {"protect_labels": "randomized_response", "label_epsilon": 50.0}
        >>> args, key = GradGuardConfig("out", **asked), LabelKey()
        >>> data = protect_labels([{"labels": 1}], args, model, key, own_batches=False)
        >>> protect_labels(data, args, model, key, own_batches=False) is data
        True
    """
    if data is None:
        return None
    if own_batches:
        raise refusal("labels-of-own-batches")
    if unknown := set(getattr(args, "label_names", None) or []) - {*_NAMES}:
        raise refusal("labels-of-other-names", names=sorted(unknown))
    if setting(args, "num_clients") and args.partition == "dirichlet":
        raise refusal("labels-with-dirichlet")
    epsilon = setting(args, "label_epsilon")
    if epsilon is None:
        raise ValueError(
            "protect_labels was set at an earlier training, and no longer is: true labels would be "
            "shared of rows whose labels were protected. Leave it set, or make a new Trainer."
        )
    if not isinstance(data, RandomizedLabels):
        _log_unit(epsilon, key)
        return RandomizedLabels(data, epsilon, number_of_classes(model), key)
    if data.epsilon != epsilon:
        raise ValueError(
            f"These labels were randomized with label_epsilon={data.epsilon:g}, and "
            f"{epsilon:g} would release each a second time. Go on with the former."
        )
    return data


def _log_unit(epsilon: float, key: LabelKey) -> None:
    protects = f"with ε = {epsilon:g} protects the label of one row."
    protects = f": {NO_EPSILON}" if key.is_from_seed else f" {protects}"
    logger.warning_once(f"protect_labels{protects} {UNIT_OF_LABELS}")


UNIT_OF_LABELS = (
    "The unit is a row: of a text that is in the data k times k labels are drawn, and ε is k times "
    "as large (at ε = 1 an attacker finds 73.1 % of the labels of single rows, and 93.5 % of texts "
    "that are there nine times). Remove duplicates first."
)


class Randomizer:
    """A randomizer of a Trainer's labels, with a key for every data set.

    A data set that is passed again gets the key that it had.

    Attributes:
        key: The key of the last data set; `None` if its labels are true.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> asked = {"protect_labels": "randomized_response", "label_epsilon": 50.0}
        >>> randomizer, args = Randomizer(), GradGuardConfig("out", **asked)
        >>> randomizer([{"labels": 1}], args, model, own_batches=False)[0]
        {'labels': 1}
    """

    def __init__(self) -> None:
        self.key: LabelKey | None = None
        self._randomized: list[RandomizedLabels] = []

    def __call__(self, data: Any, args: Any, model: nn.Module, own_batches: bool) -> Any:
        """Return training data, with randomized labels if `args.protect_labels` is set.

        Args:
            data: The training data.
            args: The training arguments.
            model: The model that predicts the labels.
            own_batches: Whether the Trainer's class reads its batches in its own way.
        """
        if setting(args, "protect_labels") is None and not self._randomized:
            return data
        seed = setting(args, "noise_seed")
        seeds = None if seed is None else (seed, args.process_index, len(self._randomized))
        dataset = next(
            (earlier_data for earlier_data in self._randomized if earlier_data.data is data), data
        )
        protected = protect_labels(dataset, args, model, LabelKey(seeds), own_batches)
        self.key = None if protected is None else protected.key
        if protected is not None and all(
            protected is not earlier_data for earlier_data in self._randomized
        ):
            self._randomized.append(protected)
        return protected


def number_of_classes(model: nn.Module) -> int:
    """Return the number K of classes that a classifier tells apart.

    Raises:
        UnsupportedError: If the model's labels are no classes.

    Example:
        >>> number_of_classes(model)
        2
    """
    config = getattr(model, "config", None)
    classes = getattr(config, "num_labels", None)
    problem = getattr(config, "problem_type", None)
    if problem in (None, "single_label_classification") and classes is not None and classes > 1:
        return int(classes)
    raise refusal(
        "labels-of-one-class", kind=type(model).__name__, classes=classes, problem=problem
    )
