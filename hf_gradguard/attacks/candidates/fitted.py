"""Likelihood of candidates for a message fitted in the span of synthetic samples' gradients.

    M = P(g + e),   score = -Σ_l d_l/2 log ‖M - P g‖²,   ‖M - P g‖² = ‖M‖² - 2⟨M, g⟩ + ‖P g‖²

Each group l of parameters has d_l factors of its own, and e, what earlier messages left out, is
noise there whose variance is not known: the best one is taken out. Only ‖P g‖² is asked of the
samples. If a message names its own samples, they are used. Others drawn in the same way span as
much of g: where it does not name any, the server draws its own.

A message of several samples is regressed on the list (regression.py), with precisions of groups,
M_l/φ_l where samples span the fraction φ_l of gradients. What it leaves out waits: the client's
next messages bring φ_l (1 - φ_l)ᵗ of it, and weigh as much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from ...defenses.mechanism import Fitted
from ...gradient_map import Batch, GradientMap, Tensors
from ...gradient_map.domain import text_keys
from ...gradient_map.per_sample.span import Powers, SampleSpan
from ...gradient_map.random_batch import synthetic_samples
from ...gradient_map.vectorized import ManyGradients
from ...randomness import Stream
from ..base import Observation
from ..layer_inputs import find_projections
from ..span.span import Span, first_projections
from .candidate_inputs import ALL_CLASSES, spread_out

LEAST_LEFT = 1e-3
"""The least fraction of a message's power that a candidate may leave: samples are not the client's
own.
"""
FRACTION_CANDIDATES = 16  # candidates, of whose gradients it is asked how much samples span
LEAST_FRACTION = 1e-3
"""The least fraction of gradients' power to divide by."""
ROUNDING_FRACTION = 1e-12
"""Parameters with a smaller fraction of a message's power have only rounding as gradient: a key's
bias.
"""


class Fits:
    """The function log p(message | gradient) of K gradients for several messages, up to a constant.

    Messages of one mechanism are compared in one span.

    Args:
        messages: Messages by number, with the mechanism of each.
        batch: A batch of the clients' kind.
        model: The model at which messages were made.
        generator: The source of the samples, which are the same for every mechanism. It is not
            changed.
        spans: Spans that are known, by number.

    Example:
        >>> mechanism = Fitted(samples=4, factors="token")
        >>> fits = Fits({0: (shared, mechanism)}, batch, model, torch.Generator())
        >>> both = ({n: sign * g[None] for n, g in shared.items()} for sign in (1, -1))
        >>> right, wrong = (fits(gradient)[0] for gradient in both)
        >>> bool(right > wrong)
        True
    """

    def __init__(
        self,
        messages: Mapping[int, tuple[Mapping[str, Tensor], Fitted]],
        batch: Batch,
        model: nn.Module,
        generator: Generator,
        spans: Mapping[int, Powers] | None = None,
    ) -> None:
        self.numbers = list(messages)
        self._messages = {number: message for number, (message, _) in messages.items()}
        self._spans, drawn_spans = dict(spans or {}), {}
        for number, (message, mechanism) in messages.items():
            if number not in self._spans:
                if mechanism not in drawn_spans:
                    drawn_spans[mechanism] = draw_span(
                        mechanism, batch, model, list(message), generator
                    )
                self._spans[number] = drawn_spans[mechanism]

    def __call__(
        self, gradient: Mapping[str, Tensor], numbers: Sequence[int] | None = None
    ) -> dict[int, Tensor]:
        """Return the log-likelihood of gradients for each message, or some, `(K,)` in float64.

        Args:
            gradient: Gradients, `(K, *parameter.shape)`.
            numbers: Numbers of the messages. Default: all.
        """
        scores, powers = {}, {}
        for number in self.numbers if numbers is None else numbers:
            span = self._spans[number]
            if id(span) not in powers:
                powers[id(span)] = span(gradient)
            scores[number] = _score(span, self._messages[number], gradient, powers[id(span)])
        return scores


def draw_span(
    mechanism: Fitted,
    batch: Batch,
    model: nn.Module,
    names: Sequence[str],
    generator: Generator,
) -> Powers:
    """Draw the span of synthetic samples of the server's own; the generator is not changed."""
    synthetic = make_synthetic(mechanism, batch, model, names, generator.clone_state())
    return SampleSpan(synthetic).powers(mechanism.factors)


def make_synthetic(
    mechanism: Fitted,
    batch: Batch,
    model: nn.Module,
    names: Sequence[str],
    generator: Generator,
) -> GradientMap:
    """Make synthetic samples of the server's own, with dropout of its own.

    Args:
        mechanism: The mechanism, which describes the samples.
        batch: A batch of the clients' kind.
        model: The model.
        names: Names of the parameters in messages.
        generator: The source of the samples.
    """
    seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        gmap = GradientMap(model, dict(batch), second_order=False)
        if withheld := [name for name in gmap.parameters if name not in names]:
            gmap = GradientMap(model, dict(batch), withhold=withheld, second_order=False)
        return synthetic_samples(
            gmap, mechanism.samples, Stream.from_seeds(seed), mechanism.special
        )


def draw_span_with_fractions(
    mechanism: Fitted,
    batches: Sequence[Mapping[str, Any]],
    many_gradients: ManyGradients,
    generator: Generator,
) -> tuple[Powers, list[float]]:
    """Draw the span of the server's own samples, and estimate φ of its groups by some candidates.

    Args:
        mechanism: The mechanism, which describes the samples.
        batches: The batches of all candidates.
        many_gradients: The function that gives their gradients.
        generator: The source of the samples. It is not changed.
    """
    model, names = many_gradients.model, list(many_gradients.parameters)
    span = draw_span(mechanism, batches[0], model, names, generator)
    sampled_gradients = many_gradients(spread_out(batches, FRACTION_CANDIDATES))
    return span, fractions_of(span, [gradient for _, gradient in sampled_gradients])


def fractions_of(span: Powers, gradients: Sequence[Mapping[str, Tensor]]) -> list[float]:
    """Return φ of each of the span's groups: the median fraction of gradients' power in it.

    Args:
        span: A span of synthetic samples.
        gradients: Gradients of several candidates each, `(K, *parameter.shape)`.
    """
    fractions = []
    for gradient in gradients:
        squares = {n: g.double().flatten(1).square().sum(1) for n, g in gradient.items()}
        sizes = [torch.stack([squares[n] for n in names]).sum(0) for names in span.names]
        fractions.append(span(gradient) / torch.stack(sizes, 1).clamp(min=1e-300))
    median = torch.cat(fractions).median(0).values
    return [float(fraction) for fraction in median.clamp(LEAST_FRACTION, 1.0)]


def accumulate(
    messages: Sequence[Mapping[str, Tensor]], span: Powers, fractions: Sequence[float]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a gradient as a client's messages since then bring it, and what its entries weigh.

    The messages also hold other batches' gradients.

    Args:
        messages: The message that was made of it, and those that came later.
        span: A span of synthetic samples.
        fractions: φ of each of its groups.
    """
    sizes = [powers_of(message) for message in messages]
    accumulated = {name: torch.zeros_like(y) for name, y in messages[0].items()}
    weights = {name: torch.zeros_like(y) for name, y in messages[0].items()}
    for names, factors, fraction in zip(span.names, span.factors.tolist(), fractions, strict=True):
        power = 0.0
        for place, (message, size) in enumerate(zip(messages, sizes, strict=True)):
            group_power = sum(size[name] for name in names)
            if group_power <= ROUNDING_FRACTION * sum(size.values()):
                continue
            precision, residual_fraction = factors / group_power, (1 - fraction) ** place
            power += precision * residual_fraction**2
            for name in names:
                accumulated[name] += precision * residual_fraction * message[name]
        for name in names:
            weights[name] += (fraction * power) ** 0.5
            accumulated[name] /= fraction * power or 1.0
    return accumulated, weights


def powers_of(message: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the power of a message, parameter by parameter.

    Example:
        >>> powers_of({"weight": torch.tensor([3.0, 4.0])})
        {'weight': 25.0}
    """
    return {name: float(y.double().square().sum()) for name, y in message.items()}


def _score(
    span: Powers, message: Mapping[str, Tensor], gradient: Mapping[str, Tensor], powers: Tensor
) -> Tensor:
    score = torch.zeros_like(powers[:, 0])
    sizes = powers_of(message)
    least = ROUNDING_FRACTION * sum(sizes.values())
    for names, factors, power in zip(span.names, span.factors.tolist(), powers.T, strict=True):
        total = sum(sizes[name] for name in names)
        if total > least:
            inner = sum(_products(gradient[name], message[name]) for name in names)
            unexplained = (1 - (2 * inner - power) / total).clamp(min=LEAST_LEFT)
            score -= factors / 2 * unexplained.log()
    return score


def _products(gradient: Tensor, message: Tensor) -> Tensor:
    """Return the inner product of each of K gradients with a message, `(K,)`."""
    return gradient.flatten(1).double() @ message.flatten().double()


LEAST_WITHIN = 0.99
"""The fraction of a message's power, group by group, that lies in no span but its own."""
LEAST_FACTORS = 0.9
"""The fraction of factors that must be of groups in which the message lies. Signs of samples'
gradients matter only where these share a factor: in what no layer has, of which two classes' labels
change no other.
"""
SWEEPS = 2  # over samples, of each of which all labels are tried
LATER_MESSAGES = 3  # messages that are read beside a first one: most of it is in these


def spans_of(
    observation: Observation,
    mechanism: Fitted,
    batch: Batch,
    generator: Generator,
) -> list[Powers]:
    """Return the spans of a message and of the client's next ones, as long as they can be read.

    Args:
        observation: The message, of a model that draws nothing.
        mechanism: The mechanism, which describes the samples.
        batch: A batch of the clients' kind.
        generator: The generator of the span attack. It is not changed.
    """
    spans: list[Powers] = []
    if observation.domain.name != "text":
        return spans
    span_rng = generator.clone_state()
    names = list(observation.gradient)
    synthetic = make_synthetic(mechanism, batch, observation.model, names, span_rng)
    later_messages: Sequence[Mapping[str, Tensor]] = ()
    if observation.mechanism is not None and observation.batch_size > 1:
        later_messages = observation.mechanism.later_messages[:LATER_MESSAGES]
    for message in (observation.gradient, *later_messages):
        span = _span_of(message, observation, mechanism, synthetic, span_rng.clone_state())
        if span is None:
            break
        spans.append(span)
    return spans


def _span_of(
    message: Mapping[str, Tensor],
    observation: Observation,
    mechanism: Fitted,
    synthetic: GradientMap,
    generator: Generator,
) -> Powers | None:
    ids = _texts(message, observation, synthetic, generator)
    if ids is None:
        return None
    samples = {**synthetic.batch, text_keys(synthetic.batch)[0]: ids}
    classes = _classes(samples, observation)
    rows = iter([*range(len(ids))] * SWEEPS if len(classes) else [])
    span = SampleSpan(synthetic.of_batch(samples)).powers(mechanism.factors)
    while fraction_within(span, message) < LEAST_FACTORS:
        if (row := next(rows, None)) is None:
            return None
        tried = [_labeled(samples, row, label) for label in classes]
        spans = [SampleSpan(synthetic.of_batch(batch)).powers(mechanism.factors) for batch in tried]
        powers_within = [float(span(_as_one(message)).sum()) for span in spans]
        best = powers_within.index(max(powers_within))
        samples, span = tried[best], spans[best]
    return span


def fraction_within(span: Powers, message: Mapping[str, Tensor]) -> float:
    """Return the fraction of a span's factors that are of groups in which a message lies.

    Example:
        >>> round(fraction_within(SampleSpan(gmap).powers("token"), gmap.gradient()), 1)
        1.0
    """
    groups = _groups(span, message, powers_of(message))
    factors_within = sum(len(y) for y, power in groups if _is_within(y, power))
    return factors_within / sum(len(y) for y, _ in groups)


def _groups(
    span: Powers, message: Mapping[str, Tensor], sizes: Mapping[str, float]
) -> list[tuple[Tensor, float]]:
    """Return a message's coordinates in each group of a span, and its power there."""
    powers = [sum(sizes[name] for name in names) for names in span.names]
    return [
        (y, power) for (y,), power in zip(span.coordinates(_as_one(message)), powers, strict=True)
    ]


def _is_within(y: Tensor, power: float) -> bool:
    """Return whether a message of this power lies in the span where its coordinates are these."""
    return float(y.square().sum()) >= LEAST_WITHIN * power


def _as_one(message: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: y[None] for name, y in message.items()}


def _texts(
    message: Mapping[str, Tensor],
    observation: Observation,
    synthetic: GradientMap,
    generator: Generator,
) -> Tensor | None:
    """Return ids `(samples, T)` of the synthetic texts; `None` if the span attack finds none."""
    keys = text_keys(synthetic.batch)
    if len(keys) != 1 or not any(y.any() for y in message.values()):
        return None
    ids = synthetic.batch[keys[0]]
    observed = Observation(
        observation.model, message, tuple(ids.shape), attention_mask=torch.ones_like(ids),
        tokenizer=observation.tokenizer, special_tokens=observation.special_tokens,
    )  # fmt: skip
    unmixed = first_projections(find_projections(observed))
    if unmixed is None or ids.numel() >= unmixed.max_rank:
        return None  # they span everything
    recovered_ids = torch.tensor(Span()(observed, generator=generator).token_ids).to(ids)
    is_complete = recovered_ids.shape == ids.shape and bool((recovered_ids >= 0).all())
    return recovered_ids if is_complete else None


def _classes(samples: Mapping[str, Any], observation: Observation) -> Tensor:
    """Return the classes that a text may have; none if labels are not a few classes."""
    labels = samples.get("labels")
    count = getattr(getattr(observation.model, "config", None), "num_labels", None) or 1
    if labels is None or labels.dim() != 1 or labels.is_floating_point() or count > ALL_CLASSES:
        return torch.empty(0)
    return torch.arange(count).to(labels)


def _labeled(samples: Mapping[str, Any], row: int, label: Tensor) -> dict[str, Any]:
    labels = samples["labels"].clone()
    labels[row] = label
    return {**samples, "labels": labels}


class SpanCoordinates:
    """Coordinates of a client's messages in the spans that each was fitted in.

    They also give the coordinates of gradients of the first message's batch.

    Args:
        messages: The first message, and those that came next, or some of these.
        spans: The span of each.

    Example:
        >>> span = SampleSpan(gmap).powers("token")
        >>> inside = SpanCoordinates([gmap.gradient()], [span])
        >>> one = inside({name: g[None] for name, g in gmap.gradient().items()})
        >>> torch.allclose(one["fitted"][0], inside.message["fitted"])
        True
    """

    def __init__(self, messages: Sequence[Mapping[str, Tensor]], spans: Sequence[Powers]) -> None:
        self._spans = list(spans)
        pairs = [(late, early) for late in range(len(spans)) for early in range(late)]
        self._across = {(i, j): self._spans[i].across(self._spans[j]) for i, j in pairs}
        coordinates, weights = [], []
        for message, span in zip(messages, spans, strict=False):
            sizes = powers_of(message)
            least = ROUNDING_FRACTION * sum(sizes.values())
            for y, power in _groups(span, message, sizes):
                is_known = power > least and _is_within(y, power)
                coordinates.append(y)
                weights.append(torch.full_like(y, (len(y) / power) ** 0.5 if is_known else 0.0))
        self.message = {"fitted": torch.cat(coordinates)}
        self.weights = {"fitted": torch.cat(weights)}

    def __call__(self, gradients: Tensors) -> Tensors:
        """Return the coordinates of gradients, `(K, coordinates)`, linear in these.

        Args:
            gradients: Gradients, `(K, *parameter.shape)`.
        """
        residuals: list[list[Tensor]] = []
        for late, span in enumerate(self._spans):
            coordinates = span.coordinates(gradients)
            for early, earlier_residual in enumerate(residuals):
                across = self._across[late, early]
                coordinates = [
                    c - b @ x.T
                    for c, b, x in zip(coordinates, earlier_residual, across, strict=True)
                ]
            residuals.append(coordinates)
        return {"fitted": torch.cat([c for coordinates in residuals for c in coordinates], 1)}
