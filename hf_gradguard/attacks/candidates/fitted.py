"""How well candidates explain a message fitted in the span of synthetic samples' gradients.

    M = P(g + e),   score = -Σ_l d_l/2 log ‖M - P g‖²,   ‖M - P g‖² = ‖M‖² - 2⟨M, g⟩ + ‖P g‖²

Each group l of parameters has d_l factors of its own, and e, what earlier messages left out, is
noise there whose variance is not known: the best one is taken out. Of the samples only ‖P g‖² is
asked for. Where a message names its own samples (in_span.py) they are these. Others drawn alike
span as much of g: where it does not, the server draws its own.

Of several samples a message of such is regressed on the list (linear.py), with precisions of
groups, M_l/φ_l where samples span the share φ_l of gradients. What it leaves out waits: the
client's next messages bring φ_l (1 - φ_l)ᵗ of it, and weigh as much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from ...defenses.mechanism import Fitted
from ...gradient_map import GradientMap
from ...gradient_map.per_sample.span import Powers, SampleSpan
from ...gradient_map.random_batch import synthetic_samples
from ...gradient_map.vectorized import ManyGradients
from ...randomness import Stream
from .pool import evenly

LEAST = 1e-3
"""Of a message's power, the share down to which what a candidate leaves of it is told: samples are
not the client's own.
"""
SHARES_OF = 16  # candidates, of whose gradients it is asked how much samples span
LEAST_SHARE = 1e-3
"""Less of gradients is not divided by."""
ROUNDED = 1e-12
"""Parameters with so little of a message's power have no gradient but rounding: a key's bias."""


class Fits:
    """log p(message | gradient) of K gradients for several messages, up to what is the same for
    all. Those of one mechanism are compared in one span.

    Args:
        messages: By number, with the mechanism of each.
        batch: Any of the clients' kind.
        model: At which messages were made.
        generator: Of the samples: the same for every mechanism, and left as it is.
        spans: Those that are known, by number.

    Example:
        >>> mechanism = Fitted(samples=4, factors="token")
        >>> told = Fits({0: (shared, mechanism)}, batch, model, torch.Generator())
        >>> both = ({n: sign * g[None] for n, g in shared.items()} for sign in (1, -1))
        >>> right, wrong = (told(gradient)[0] for gradient in both)
        >>> bool(right > wrong)
        True
    """

    def __init__(
        self,
        messages: Mapping[int, tuple[Mapping[str, Tensor], Fitted]],
        batch: Mapping[str, Any],
        model: nn.Module,
        generator: Generator,
        spans: Mapping[int, Powers] | None = None,
    ) -> None:
        self.numbers = list(messages)
        self._messages = {number: message for number, (message, _) in messages.items()}
        self._spans, own = dict(spans or {}), {}
        for number, (message, mechanism) in messages.items():
            if number not in self._spans:
                if mechanism not in own:
                    own[mechanism] = drawn(mechanism, batch, model, list(message), generator)
                self._spans[number] = own[mechanism]

    def __call__(
        self, gradient: Mapping[str, Tensor], numbers: Sequence[int] | None = None
    ) -> dict[int, Tensor]:
        """`(K,)` in float64 for each message, or some, of gradients `(K, *parameter.shape)`."""
        found, powers = {}, {}
        for number in self.numbers if numbers is None else numbers:
            span = self._spans[number]
            if id(span) not in powers:
                powers[id(span)] = span(gradient)
            found[number] = _score(span, self._messages[number], gradient, powers[id(span)])
        return found


def drawn(
    mechanism: Fitted,
    batch: Mapping[str, Any],
    model: nn.Module,
    names: Sequence[str],
    generator: Generator,
) -> Powers:
    """Of the span of synthetic samples of the server's own. The generator is left as it is."""
    made = made_up(mechanism, batch, model, names, generator.clone_state())
    return SampleSpan(made).powers(mechanism.factors)


def made_up(
    mechanism: Fitted,
    batch: Mapping[str, Any],
    model: nn.Module,
    names: Sequence[str],
    generator: Generator,
) -> GradientMap:
    """Synthetic samples of the server's own, with dropout of its own.

    Args:
        mechanism: Of the samples.
        batch: Any of the clients' kind.
        model: The model.
        names: Of the parameters that messages are of.
        generator: Of the samples.
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


def spanned(
    mechanism: Fitted,
    batches: Sequence[Mapping[str, Any]],
    many: ManyGradients,
    generator: Generator,
) -> tuple[Powers, list[float]]:
    """The span of the server's own samples, and φ of its groups, by some candidates.

    Args:
        mechanism: Of the samples.
        batches: Of all candidates.
        many: Their gradients.
        generator: Of the samples. Left as it is.
    """
    span = drawn(mechanism, batches[0], many.model, list(many.parameters), generator)
    some = many(evenly(batches, SHARES_OF))
    return span, shares_of(span, [gradient for _, gradient in some])


def shares_of(span: Powers, gradients: Sequence[Mapping[str, Tensor]]) -> list[float]:
    """φ of each of the span's groups: what share of gradients' power it has, at their median.

    Args:
        span: Of synthetic samples.
        gradients: Each of several candidates, `(K, *parameter.shape)`.
    """
    found = []
    for gradient in gradients:
        squares = {n: g.double().flatten(1).square().sum(1) for n, g in gradient.items()}
        sizes = [torch.stack([squares[n] for n in names]).sum(0) for names in span.names]
        found.append(span(gradient) / torch.stack(sizes, 1).clamp(min=1e-300))
    median = torch.cat(found).median(0).values
    return [float(share) for share in median.clamp(LEAST_SHARE, 1.0)]


def brought(
    messages: Sequence[Mapping[str, Tensor]], span: Powers, shares: Sequence[float]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A gradient as a client's messages since then bring it, beside other batches', and what its
    entries weigh.

    Args:
        messages: The one that was made of it, and those that came later.
        span: Of synthetic samples.
        shares: φ of each of its groups.
    """
    sizes = [sizes_of(message) for message in messages]
    found, weights = ({name: torch.zeros_like(y) for name, y in messages[0].items()} for _ in "yw")
    for names, factors, share in zip(span.names, span.factors.tolist(), shares, strict=True):
        power = 0.0
        for place, (message, size) in enumerate(zip(messages, sizes, strict=True)):
            own = sum(size[name] for name in names)
            if own <= ROUNDED * sum(size.values()):
                continue
            precision, left = factors / own, (1 - share) ** place
            power += precision * left**2
            for name in names:
                found[name] += precision * left * message[name]
        for name in names:
            weights[name] += (share * power) ** 0.5
            found[name] /= share * power or 1.0
    return found, weights


def sizes_of(message: Mapping[str, Tensor]) -> dict[str, float]:
    """Its power, parameter by parameter.

    Example:
        >>> sizes_of({"weight": torch.tensor([3.0, 4.0])})
        {'weight': 25.0}
    """
    return {name: float(y.double().square().sum()) for name, y in message.items()}


def _score(
    span: Powers, message: Mapping[str, Tensor], gradient: Mapping[str, Tensor], powers: Tensor
) -> Tensor:
    score = torch.zeros_like(powers[:, 0])
    sizes = sizes_of(message)
    least = ROUNDED * sum(sizes.values())
    for names, factors, power in zip(span.names, span.factors.tolist(), powers.T, strict=True):
        total = sum(sizes[name] for name in names)
        if total > least:
            inner = sum(_products(gradient[name], message[name]) for name in names)
            left = (1 - (2 * inner - power) / total).clamp(min=LEAST)
            score -= factors / 2 * left.log()
    return score


def _products(gradient: Tensor, message: Tensor) -> Tensor:
    """`(K,)`, of each of K gradients with a message."""
    return gradient.flatten(1).double() @ message.flatten().double()
