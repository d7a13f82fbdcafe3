"""Accounting of how much a training has leaked about each example so far.

    FIM(z) ≼ Σ_t κ FIM_t(z),    κ = q/(q + (1-q) e^{-ε})

The sum over steps holds for any schedule. The factor κ < 1 is for batches drawn at random and kept
secret, with Gaussian noise on smoothly clipped gradients, and fails with probability δ a step. ε is
that of the noise's (ε, δ)-differential privacy. Guo et al. take the classical ε = μ √(2 ln(1.25/δ))
with μ = 2 · 1.115/σ, which is proved for ε < 1 only; here it is the exact one.

References: Guo et al. (2022), Theorems 3 and 4, Eq. 4 and Algorithm 1; Balle and Wang, "Improving
the Gaussian Mechanism for Differential Privacy" (2018), Theorem 8.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..gradient_map import GradientMap, Tensors
from ..gradient_map.views import SMOOTH_CLIP_NORM
from .bounds import mse_bound_from_dfil

Key = int | str
_LITTLE_NOISE = 1e-3


def subsampling_factor(sampling_rate: float, noise_multiplier: float, delta: float) -> float:
    """Return κ, by which the secrecy of a batch's members multiplies a step's information.

    Args:
        sampling_rate: q = B/n, with batches drawn uniformly without replacement, independently at
            each step. An epoch's shuffle is no such draw.
        noise_multiplier: σ of the noise σC on the sum of smoothly clipped gradients.
        delta: The probability that the bound fails at this step, between 0 and 1.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> round(subsampling_factor(sampling_rate=0.01, noise_multiplier=10.0, delta=1e-5), 4)
        0.0224
    """
    if not 0 < sampling_rate <= 1:
        raise ValueError(f"sampling_rate must be above 0 and at most 1, but is {sampling_rate}.")
    if not noise_multiplier > 0:
        raise ValueError(f"noise_multiplier must be above 0, but is {noise_multiplier}.")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be between 0 and 1, but is {delta}.")
    # replacing one example moves the sum by up to twice the norm that smooth clipping leaves
    epsilon = gaussian_epsilon(noise_multiplier / (2 * SMOOTH_CLIP_NORM), delta)
    return sampling_rate / (sampling_rate + (1 - sampling_rate) * math.exp(-epsilon))


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """Return the smallest ε for which Gaussian noise is (ε, δ)-differentially private.

    It is the root of δ = Φ(1/2σ - εσ) - e^ε Φ(-1/2σ - εσ), by `dp-accounting`. Below σ = 0.001,
    where the two terms leave no digits, it is the root without the second, which is larger by a few
    millionths.

    Args:
        noise_multiplier: σ: the standard deviation of the noise, divided by the largest change that
            replacing one record makes.
        delta: δ, between 0 and 1.

    Reference: Balle and Wang (2018), Theorem 8.

    Example:
        >>> round(gaussian_epsilon(noise_multiplier=3.730632, delta=1e-5), 6)
        1.0
    """
    from dp_accounting import get_epsilon_gaussian  # not where no ε is asked for: it takes a second

    if 0 < noise_multiplier < _LITTLE_NOISE and 0 < delta < 1:
        distance = 1 / noise_multiplier
        return distance * (distance / 2 - NormalDist().inv_cdf(delta))
    with np.errstate(all="ignore"):  # log 0 where its search starts too far to the right
        return float(get_epsilon_gaussian(noise_multiplier, delta))


class FisherAccountant:
    """The dFIL of each example, added up over the steps that it took part in.

    It is private to the client, like the examples.

    Args:
        sampling_rate: q; with `noise_multiplier` and `delta` each step is multiplied by κ
            (`subsampling_factor`). Leave all three out if batches are not drawn at random
            independently: κ = 1.
        noise_multiplier: σ of the noise σC on the sum of smoothly clipped gradients.
        delta: The probability that κ fails at a step.

    Example:
        >>> from hf_gradguard.leakage import dfil
        >>> accountant, keys = FisherAccountant(), example_keys(gmap)
        >>> accountant.step(keys, *dfil(gmap, noise_variance=1e-6, num_probes=4))
        >>> accountant.steps, len(accountant), accountant.worst()[0] in keys
        (1, 2, True)
        >>> accountant.mse_bound(keys[0]) == 1 / accountant.dfil(keys[0])
        True
    """

    def __init__(
        self,
        sampling_rate: float | None = None,
        noise_multiplier: float | None = None,
        delta: float | None = None,
    ) -> None:
        if sampling_rate is None and noise_multiplier is None and delta is None:
            self.factor, self._delta = 1.0, 0.0
        elif sampling_rate is None or noise_multiplier is None or delta is None:
            raise ValueError(
                "Give sampling_rate, noise_multiplier and delta together, or none of them."
            )
        else:
            self.factor = subsampling_factor(sampling_rate, noise_multiplier, delta)
            self._delta = delta
        self.noise_multiplier = noise_multiplier
        self._rows: dict[Key, int] = {}
        self._totals: list[float] = []
        self._variances: list[float] = []
        self.steps = 0
        self.failure_probability = 0.0

    def step(self, keys: Sequence[Key], dfil: Tensor, standard_error: Tensor | None = None) -> None:
        """Add the information of one message.

        An example that is n times in the batch counts n times the sum of its rows: its Jacobian is
        the sum of theirs, and ‖a_1 + … + a_n‖² ≤ n Σ ‖a_i‖².

        Args:
            keys: The example that each row of the batch is: its index in the data set, or its
                content (`example_keys`).
            dfil: η̄² of each row, `(B,)`.
            standard_error: The standard errors of `dfil`, if it is an estimate; they are taken as
                independent between steps.

        Raises:
            TypeError: If a key is neither an integer nor a string.
            ValueError: If lengths differ, or a value is negative or NaN. Nothing is added then.
        """
        self.add_release(self.release(keys, dfil, standard_error))

    def release(
        self, keys: Sequence[Key], dfil: Tensor, standard_error: Tensor | None = None
    ) -> dict[str, Any]:
        """Return what `step` would add, as JSON can hold it, to be stored before it is shared.

        Args:
            keys: The example that each row of the batch is.
            dfil: η̄² of each row, `(B,)`.
            standard_error: The standard errors of `dfil`, if it is an estimate.

        Raises:
            TypeError: If a key is neither an integer nor a string.
            ValueError: If lengths differ, or a value is negative or NaN.

        Example:
            >>> accountant = FisherAccountant()
            >>> release = accountant.release([7], torch.tensor([0.5]))
            >>> accountant.add_release(release)
            >>> accountant.dfil(7)
            0.5
        """
        keys = keys.tolist() if hasattr(keys, "tolist") else [_plain(key) for key in keys]
        values = dfil.tolist()
        errors = [0.0] * len(values) if standard_error is None else standard_error.tolist()
        if not len(keys) == len(values) == len(errors):
            raise ValueError(
                f"{len(keys)} keys, {len(values)} values and {len(errors)} errors do not go "
                "together."
            )
        if not all(value >= 0 for value in values + errors):
            raise ValueError(
                "dFIL and its standard error must be at least 0, but one is smaller or NaN."
            )
        return {
            "keys": keys,
            "dfil": values,
            "errors": errors,
            "factor": self.factor,
            "failure_probability": self._delta,
        }

    def add_release(self, release: Mapping[str, Any]) -> None:
        """Count a message that `release` described, with the factor κ that it had then.

        Args:
            release: The result of `release`.
        """
        copies = Counter(release["keys"])
        sums = {key: [0.0, 0.0] for key in copies}  # rows of one example have the same probes
        for key, value, error in zip(
            release["keys"], release["dfil"], release["errors"], strict=True
        ):
            sums[key][0] += value
            sums[key][1] += error
        for key, (value, error) in sums.items():
            row, weight = self._row(key), release["factor"] * copies[key]
            self._totals[row] += weight * value
            self._variances[row] += (weight * error) ** 2
        self.steps += 1
        failure = self.failure_probability + release["failure_probability"]
        self.failure_probability = min(failure, 1.0)

    def dfil(self, key: Key) -> float:
        """Return the dFIL η̄² of an example over all steps so far; 0 if it was in none.

        Args:
            key: The example, as `step` got it.
        """
        return self._totals[self._rows[key]] if key in self._rows else 0.0

    def standard_error(self, key: Key) -> float:
        """Return the standard error of `dfil(key)`."""
        return math.sqrt(self._variances[self._rows[key]]) if key in self._rows else 0.0

    def mse_bound(self, key: Key) -> float:
        """Return the least MSE per coordinate of an unbiased attacker on an example so far."""
        return mse_bound_from_dfil(self.dfil(key))

    def worst(self) -> tuple[Key, float]:
        """Return the example that has leaked most, and its η̄².

        Raises:
            ValueError: If there was no step yet.
        """
        if not self._rows:
            raise ValueError("Nothing has been accounted yet.")
        return max(zip(self._rows, self._totals, strict=True), key=lambda item: item[1])

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._rows)

    def state_dict(self) -> Tensors:
        """Return the whole state as tensors, which are private to the client."""
        return {
            "keys": torch.tensor(list(json.dumps(list(self._rows)).encode()), dtype=torch.uint8),
            "totals": torch.tensor(self._totals, dtype=torch.float64),
            "variances": torch.tensor(self._variances, dtype=torch.float64),
            "steps": torch.tensor(self.steps),
            "failure_probability": torch.tensor(self.failure_probability, dtype=torch.float64),
        }

    def load_state_dict(self, state: Tensors) -> None:
        """Add a saved state to what this object has counted.

        Messages that this object has counted beyond that state stay, since they were shared as
        well. Later steps use this object's own κ, whatever the earlier ones used.

        Args:
            state: The tensors that `state_dict` returned.
        """
        keys: list[Key] = json.loads(bytes(state["keys"].tolist()))
        totals, variances = state["totals"].tolist(), state["variances"].tolist()
        for key, total, variance in zip(keys, totals, variances, strict=True):
            row = self._row(key)
            if total >= self._totals[row]:
                self._totals[row], self._variances[row] = total, variance
        self.steps = max(self.steps, int(state["steps"]))
        failure = float(state["failure_probability"])
        self.failure_probability = max(self.failure_probability, failure)

    def load_releases(
        self, releases: Iterable[Mapping[str, Any]], state: Tensors | None = None
    ) -> None:
        """Count a saved state, and the messages that were released after it was saved.

        Messages that this object has counted beyond them stay, since they were shared as well.

        Args:
            releases: The results of `release` for these messages.
            state: The tensors that `state_dict` returned; `None` without a saved state.
        """
        resumed = FisherAccountant()
        if state is not None:
            resumed.load_state_dict(state)
        for release in releases:
            resumed.add_release(release)
        self.load_state_dict(resumed.state_dict())

    def _row(self, key: Key) -> int:
        row = self._rows.setdefault(key, len(self._rows))
        if row == len(self._totals):
            self._totals.append(0.0)
            self._variances.append(0.0)
        return row


def _plain(key: Any) -> Key:
    """Return a key that equals itself the next time, and that JSON can hold."""
    plain: Key = key.item() if hasattr(key, "item") else key
    if not isinstance(plain, Key):
        raise TypeError(f"A key is an integer or a string, and not {type(key).__name__}.")
    return plain


def example_keys(gmap: GradientMap) -> list[str]:
    """Return one key per sample of the batch, made from its real tokens or its pixels.

    A key cannot be inverted, but the content behind it can be guessed.

    Example:
        >>> [len(key) for key in example_keys(gmap)]  # SHA-256, in hexadecimal digits
        [64, 64]
    """
    present = gmap.domain.present(gmap.batch)
    keys = []
    for index, row in enumerate(gmap.domain.main_input(gmap.batch)):
        content = row if present is None else row[present[index]]
        bytes_ = content.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        keys.append(hashlib.sha256(bytes_).hexdigest())
    return keys
