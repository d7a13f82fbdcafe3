"""Scores of texts for a message, from layers' inputs and slopes, whitened by public texts.

A linear layer's gradient is g = Σ_t δ_t a_tᵀ. A candidate that shares some words with the true text
says what the message is, up to how much texts differ and the noise. So products are taken where
gradients of public texts hardly covary: in the eigenvectors of their slopes δ and of their inputs
a, each pair divided by its own variance plus damping (George et al., "Fast Approximate Natural
Gradient Descent in a Kronecker-factored Eigenbasis", 2018, of Martens and Grosse, 2015). What all
texts have in common is subtracted. The normalized product is the score, in standard deviations of
the noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ...defenses.mechanism import Mechanism
from ...gradient_map.inputs import model_loss
from ...gradient_map.layers import LINEAR, LayerContribution, Listener, ghost_squares
from ...gradient_map.per_sample.products import GradientProducts
from ...gradient_map.replay import Replay
from ...gradient_map.types import Tensors
from ...gradient_map.vectorized import ManyGradients
from ..base import Observation
from ..candidates.sample_likelihood import ProductLikelihood
from .messages import WhiteMessage

Text = tuple[int, ...]
"""The ids of a text's words, without the special tokens around them."""

_Factors = dict[str, tuple[Tensor, Tensor]]
AT_ONCE = 64
"""The number of texts in one pass."""
_PUBLIC = 192  # texts, of which covariances are
_RANKS = (64, 128)  # eigenvectors of slopes and of inputs
_FULL = 512  # sides as short as that have all eigenvectors computed
_FACTORED = 0.3  # of a pair's variance comes from the product of both sides'
_COUNTED = 0.95  # of the score's square is in the layers that are used
_UNLIKE = 0.5  # standard deviation of the logarithms of norms, above which these are left out
_LEAST = 1.0  # of a tensor's squared norm, in units of the noise's variance


@dataclass
class _LayerMetric:
    """One layer's metric, in the eigenvectors of public texts' slopes and inputs.

    Args:
        outputs: The eigenvectors of slopes, `(out, r)`.
        inputs: The eigenvectors of inputs, `(in, q)`.
        mean: The mean of public texts' gradients, `(r, q)`.
        weights: 1 by the sum of these gradients' variance and damping, `(r, q)`.
        message: The message, `(r, q)`.
    """

    outputs: Tensor
    inputs: Tensor
    mean: Tensor
    weights: Tensor
    message: Tensor

    def gradients(self, slopes: Tensor, features: Tensor) -> Tensor:
        """Return gradients in these coordinates, `(K, r, q)`."""
        return (slopes @ self.outputs).mT @ (features @ self.inputs)

    def coordinates(self, slopes: Tensor, features: Tensor) -> Tensor:
        """Return gradients less their mean in these coordinates, `(K, r, q)`."""
        return self.gradients(slopes, features) - self.mean


class WhitenedScore:
    """The score of texts of one length, in standard deviations of the noise.

    Args:
        observation: The observation of the server, of one sample.
        message: Linear layers' tensors, with white noise of variance 1.
        public: Texts of that length, which give means and covariances.
        label: The class `(1,)` that texts are taken to have; none for language models.
        damping: The damping, in variances of the noise.
        classes: The classes of other texts in the message, without the class of this text.
        texts: The number of texts in the message.

    Raises:
        ValueError: If the message has no linear layer whose gradient stands out.
    """

    def __init__(
        self, observation: Observation, message: WhiteMessage, public: Sequence[Text],
        label: Tensor | None, damping: float, classes: Sequence[Tensor] = (), texts: int = 1,
    ) -> None:  # fmt: skip
        self.observation, self.message, self.label = observation, message, label
        parameters = dict(observation.model.named_parameters())
        self._parameters = {name: parameters[name] for name in message.tensors}
        self._norm: float | None = None
        self._layers: dict[str, _LayerMetric] = {}
        factors = self._public_factors(list(public[:_PUBLIC]))
        if float(_norms(factors).clamp(min=1e-300).log().std()) > _UNLIKE:
            self._norm = message.gradient_norm(message.tensors, texts)
        changes = self._take_metric(factors, damping)
        self._keep_largest(changes)
        if self._norm is not None:  # gradients have one norm in the layers that are used
            self._norm = message.gradient_norm(self._layers, texts)
            changes = self._take_metric({name: factors[name] for name in self._layers}, damping)
        self._parameters = {name: parameters[name] for name in self._layers}
        self._whole = {name: layer.message for name, layer in self._layers.items()}
        self._means = [{name: layer.mean for name, layer in self._layers.items()}]
        for other_class in classes:
            pairs_of_label = self._factors(self.batch(public[:AT_ONCE], other_class))
            self._means.append({name: self._layers[name].gradients(*pair).mean(0)
                                for name, pair in pairs_of_label.items()})  # fmt: skip
        self.fit = self._center()
        _, squares, noise, _ = self._products({name: changes[name] for name in self._layers})
        self.unit = float((noise / squares).mean().sqrt())
        self.expected = self._expect(squares, texts) if message.is_noise_known else None

    def _public_factors(self, public: Sequence[Text]) -> _Factors:
        """Return the factors of all public texts."""
        batches = [
            self._raw_factors(self.batch(public[start : start + AT_ONCE]))
            for start in range(0, len(public), AT_ONCE)
        ]
        factors = {}
        for name in batches[0]:
            slopes, features = zip(*(batch[name] for batch in batches), strict=True)
            factors[name] = torch.cat(slopes), torch.cat(features)
        return factors

    def _take_metric(self, factors: _Factors, damping: float) -> Tensors:
        """Choose the layers whose gradients stand out, and return public texts' coordinates."""
        changes: Tensors = {}
        self._layers = {}
        for name, (slopes, features) in self._of_norm(factors).items():
            if float(ghost_squares(slopes, features, bounds=False).mean()) >= _LEAST:
                layer = _metric(self.message.tensors[name], slopes, features, damping)
                self._layers[name] = layer
                changes[name] = layer.coordinates(slopes, features)
        return changes

    def _keep_largest(self, changes: Mapping[str, Tensor]) -> None:
        """Drop layers that say little: they cost as much as others, the lowest ones most."""
        if not changes:
            raise ValueError(
                "No linear layer's gradient of public texts stands out of this message's noise."
            )
        sizes = {
            name: float((change.square() * self._layers[name].weights).sum(dtype=torch.float64))
            for name, change in changes.items()
        }
        total, counted = sum(sizes.values()), 0.0
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            if counted >= _COUNTED * total:
                del self._layers[name]
            counted += sizes[name]

    def _center(self) -> float:
        """Subtract classes' mean gradients from the message, and return how well the mean fits.

        As much of them is subtracted as the message has, since losses differ, and defenses may
        scale.
        """
        count = len(self._means)
        product, square = (
            torch.zeros(count, dtype=torch.float64),
            torch.zeros(count, count).double(),
        )
        for name, layer in self._layers.items():
            means = torch.stack([mean[name] for mean in self._means]).flatten(1)
            weighed = means * layer.weights.flatten()
            product += (weighed.double() @ layer.message.flatten().double()).cpu()
            square += (weighed.double() @ means.double().T).cpu()
        self._mean_square = float(square[0, 0]) + 1e-300
        if count == 1:
            fractions = [max(float(product[0]) / self._mean_square, 0.0)]
        else:  # of two classes they are nearly opposite
            ridge = 1e-6 * square.diagonal().mean() * torch.eye(count).double()
            fractions = torch.linalg.solve(square + ridge, product).tolist()
        for name, layer in self._layers.items():
            for fraction, mean in zip(fractions, self._means, strict=True):
                layer.message = layer.message - fraction * mean[name]
        return float(product[0]) / self._mean_square**0.5

    def leave_out(self, batches: Sequence[tuple[Mapping[str, Tensor], float]]) -> None:
        """Subtract other texts from the message.

        Args:
            batches: Batches of one text each, and how much of its gradient is subtracted, in units
                of the fraction that a scored text has.
        """
        parts = [(self._factors(batch), fraction) for batch, fraction in batches]
        for name, layer in self._layers.items():
            layer.message = self._whole[name]
            for factors, fraction in parts:
                layer.message = layer.message - fraction * layer.gradients(*factors[name])[0]
        self._center()

    def _expect(self, squares: Tensor, texts: int) -> float:
        """Return the score that the true text would have: its norm in this metric.

        It is known from the message's own norm less that of noise, and from public texts; each
        counts by its precision.
        """
        weights = torch.cat([layer.weights.flatten() for layer in self._layers.values()]).double()
        entries = torch.cat([layer.message.flatten() for layer in self._layers.values()]).double()
        power = float((weights * (entries.square() - 1)).sum()) / texts
        spread = float((weights.square() * (2 + 4 * (entries.square() - 1).clamp(min=0))).sum())
        spread /= texts**2
        usual, usual_spread = float(squares.mean()), float(squares.var()) + 1e-30
        mean = (power / spread + usual / usual_spread) / (1 / spread + 1 / usual_spread)
        return max(mean, 0.0) ** 0.5 / self.unit

    def _products(self, changes: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return four products of gradients' changes, `(K,)` each.

        They are with the message, with themselves, how much noise varies the first, and with the
        mean.
        """
        totals: list[Any] = [0.0, 0.0, 0.0, 0.0]
        for name, change in changes.items():
            layer = self._layers[name]
            weighed = change * layer.weights
            for place, factor in enumerate((layer.message, change, weighed, layer.mean)):
                product = (weighed * factor).flatten(1).sum(1, dtype=torch.float64)
                totals[place] = totals[place] + product
        return totals[0], totals[1], totals[2], totals[3]

    def __call__(self, texts: Sequence[Text]) -> Tensor:
        """Return the score of each text, and its mean if the text were the true one.

        They are `(K, 2)` in float64.
        """
        rows = [torch.zeros(0, 2, dtype=torch.float64)]
        for start in range(0, len(texts), AT_ONCE):
            factors = self._factors(self.batch(texts[start : start + AT_ONCE]))
            inner, squares, _, common = self._products(
                {name: self._layers[name].coordinates(*pair) for name, pair in factors.items()}
            )
            norms = squares.clamp(min=1e-300).sqrt()
            # Its message would have lost its own share of the mean, which is not 1.
            own_products = squares - (common / self._mean_square).clamp(min=-1) * common
            rows.append(
                (torch.stack([inner, own_products], 1) / (norms[:, None] * self.unit)).cpu()
            )
        return torch.cat(rows)

    def _factors(self, batch: Mapping[str, Tensor]) -> _Factors:
        """Return each layer's slopes and features, `(K, T, F)`, where the noise is white.

        Gradients have the message's norm.
        """
        return self._of_norm(self._raw_factors(batch))

    def _of_norm(self, factors: _Factors) -> _Factors:
        """Return factors of gradients scaled to the message's norm.

        What a model knows well has a gradient hundreds of times smaller than what it gets wrong, in
        nearly the same directions.
        """
        if self._norm is None:
            return factors
        norms = _norms(factors)  # 0 of a loss that is 0
        sizes = torch.where(norms > 0, self._norm / norms, 0).float()[:, None, None]
        return {name: (slopes * sizes, features) for name, (slopes, features) in factors.items()}

    def _raw_factors(self, batch: Mapping[str, Tensor]) -> _Factors:
        """Return each layer's slopes and features, with gradients of the model's own norm."""
        factors = layer_factors(self.observation.model, self._parameters, batch)
        return {name: self.message.whiten(name, *pair) for name, pair in factors.items()}

    def batch(self, texts: Sequence[Text], label: Tensor | None = None) -> dict[str, Tensor]:
        """Return texts as clients have them, of the assumed class or another one."""
        return text_batch(self.observation, texts, self.label if label is None else label)


class WholeLikelihood:
    """The log-likelihood ratio log p(message | text)/p(message | no gradient), in nats.

    It uses everything that was shared. Far from the true text few entries decide it, and no climb
    leads up; near it nothing distinguishes texts as well.

    Args:
        score: The score of the same message, of one text.
        mechanism: A mechanism to which it `applies`.
    """

    expected = None

    def __init__(self, score: WhitenedScore, mechanism: Mechanism) -> None:
        message = dict(score.observation.gradient)
        power = sum(float(y.square().sum(dtype=torch.float64)) for y in message.values())
        least = 1e-8 * power / sum(y.numel() for y in message.values())
        self._likelihood = ProductLikelihood(mechanism, message, dict.fromkeys(message, least))
        many_gradients = ManyGradients(score.observation.model, list(message))
        self._products, self.batch = GradientProducts(many_gradients), score.batch

    @staticmethod
    def applies(observation: Observation, mechanism: Mechanism | None) -> bool:
        """Return whether products tell the noise of a message of one text and one step."""
        if observation.batch_size > 1 or observation.local is not None or mechanism is None:
            return False
        return ProductLikelihood.applies(mechanism, dict(observation.gradient))

    def __call__(self, texts: Sequence[Text]) -> Tensor:
        """Return the log-likelihood ratios of texts, `(K, 2)` in float64, with zeros second."""
        scores = torch.zeros(len(texts), 2, dtype=torch.float64)
        batches, likelihood = [self.batch([text]) for text in texts], self._likelihood
        for rows, computed in self._products(batches, [likelihood.message], likelihood.weights):
            scores[rows, 0] = (likelihood(computed, 0) - likelihood.constant).cpu()
        return scores


def public_ids(texts: Sequence[Any], observation: Observation) -> list[Text]:
    """Return the ids of texts, or ids as they are, without special tokens.

    Raises:
        ValueError: If the observation has no tokenizer.

    Example:
        >>> public_ids([torch.tensor([5, 6])], observation)
        [(5, 6)]
    """
    tokenizer = observation.tokenizer
    if tokenizer is None:
        raise ValueError("Public texts are read: give the Observation the model's tokenizer.")
    special = set(tokenizer.all_special_ids)
    encoded = [
        tokenizer(text, add_special_tokens=False)["input_ids"]
        if isinstance(text, str)
        else torch.as_tensor(text).flatten().tolist()
        for text in texts
    ]
    return [tuple(word for word in ids if word not in special) for ids in encoded]


def text_batch(
    observation: Observation, texts: Sequence[Text], label: Tensor | None
) -> dict[str, Tensor]:
    """Return texts of one length as clients have them.

    Args:
        observation: The observation of their message.
        texts: Texts without the special tokens around them.
        label: The class of all, `(1,)`; none for language models.

    Example:
        >>> text_batch(observation, [(5, 6)], torch.tensor([1]))["attention_mask"].shape[0]
        1
    """
    prefix_ids, suffix_ids = observation.frame
    device = observation.device
    ids = torch.tensor([[*prefix_ids, *text, *suffix_ids] for text in texts], device=device)
    labels = ids if label is None else label.to(device).expand(len(texts), *label.shape[1:])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def layer_factors(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], batch: Mapping[str, Tensor]
) -> _Factors:
    """Return each linear layer's slopes and inputs, by the name of its weight.

    Slopes of samples' losses are `(K, T, out)`, inputs `(K, T, in)`.

    Args:
        model: The model.
        parameters: Weights whose layers are asked for, by name.
        batch: A batch of K samples.

    Example:
        >>> weights = {"classifier.weight": model.classifier.weight}
        >>> slopes, features = layer_factors(model, weights, batch)["classifier.weight"]
        >>> slopes.shape[:2] == features.shape[:2] == (2, 1)
        True
    """
    count = len(batch["input_ids"])
    with Replay(model, second_order=False).run(), torch.enable_grad():
        listener = Listener(model, dict(parameters), batch, count)
        with listener.listening():
            loss = model_loss(model, dict(batch)) * count
        contributions = listener.contributions(loss)
    return {
        entry.layer.weight: entry.joined()
        for entry in contributions.values()
        if isinstance(entry, LayerContribution)
        and isinstance(entry.layer.module, LINEAR)
        and entry.layer.weight is not None
    }


def _norms(factors: _Factors) -> Tensor:
    """Return the norms of gradients, `(K,)` in float64."""
    squares = [ghost_squares(*pair, bounds=False) for pair in factors.values()]
    return torch.stack(squares).sum(0).sqrt()


def _metric(y: Tensor, slopes: Tensor, features: Tensor, damping: float) -> _LayerMetric:
    outputs, inputs = (
        _eigenvectors(rows.flatten(0, 1), rank)
        for rows, rank in zip((slopes, features), _RANKS, strict=True)
    )
    gradients = (slopes @ outputs).mT @ (features @ inputs)
    mean = gradients.mean(0)
    variance = (gradients - mean).square().mean(0)
    # Few texts say little of single pairs.
    slope_squares = (slopes @ outputs).square().mean((0, 1))
    factored = slope_squares[:, None] * (features @ inputs).square().mean((0, 1))
    factored = factored * (variance.sum() / factored.sum().clamp(min=1e-38))
    variance = (1 - _FACTORED) * variance + _FACTORED * factored
    return _LayerMetric(outputs, inputs, mean, 1 / (variance + damping), outputs.T @ y @ inputs)


def _eigenvectors(rows: Tensor, rank: int) -> Tensor:
    """Return the directions along which rows `(n, d)` vary most, `(d, rank)`."""
    if rows.shape[1] <= _FULL:
        _, vectors = torch.linalg.eigh(rows.T @ rows)
        return vectors.flip(1)[:, :rank].contiguous()
    # Subspace iteration, from a start of its own: nothing is drawn from the process's generator.
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(rows.shape[1], min(rank + 16, *rows.shape), generator=generator)
    vectors = start.to(rows)
    for _ in range(3):
        vectors = torch.linalg.qr(rows.T @ (rows @ vectors))[0]
    image = rows @ vectors
    vectors = vectors @ torch.linalg.eigh(image.T @ image)[1].flip(1)
    return vectors[:, :rank].contiguous()


def linear_names(model: nn.Module) -> dict[str, bool]:
    """Return, by the name of each linear layer's weight, whether it is stored as `(in, out)`.

    Example:
        >>> linear_names(model)["classifier.weight"]
        False
    """
    return {
        f"{name}.weight": isinstance(module, Conv1D)
        for name, module in model.named_modules()
        if isinstance(module, LINEAR)
    }
