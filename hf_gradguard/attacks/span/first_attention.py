"""Equations for what an encoder's first attention gives at a token that is known.

Every head averages what it takes of all tokens, Σ wⱼvⱼ / Σ wⱼ. Weights and values are read off the
model itself, with few tokens attended at once, so that no architecture needs a case of its own. The
average lies in the span of the gradient of the layer that reads it; and if that layer's output is
added to the token's own input and normalized, the result lies in the span of the next one's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...gradient_map.replay import hooked
from ..base import ENDLESS, Clock, Observation
from ..layer_inputs import Projections, all_inputs, two_tokens
from .row_space import View
from .sentences import CHUNK

TINY = torch.finfo(torch.float64).tiny


class FirstAttention:
    """The first attention: its weights and values, and which averages of values it may give.

    All are in float64, in a copy of the model: for a head that looks at a single token, float32
    leaves nothing but rounding for the others.

    Args:
        observation: The observation of the server.
        views: Layers behind the attention, with the spans of their gradients. The first one reads
            its output.

    Attributes:
        is_average: Whether each head gives an average of tokens' values, as it was tried.
        num_equations: The number of equations of an average.

    Example:
        >>> from hf_gradguard.attacks.layer_inputs import find_projections
        >>> from hf_gradguard.attacks.span.row_space import row_space
        >>> mixed = [group for group in find_projections(seen) if group.mixing == "full"][:2]
        >>> views = [View(r, row_space(r.gradients(observation), None, rank=13)) for r in mixed]
        >>> attention, ids = FirstAttention(observation, views), torch.tensor([7, 8, 9])
        >>> (weights,) = attention.weights(0, {0: 2, 7: 3}, {3: ids})
        >>> attention.values(3, ids).shape[:2] == weights.shape == (3, attention.heads)
        True
    """

    def __init__(self, observation: Observation, views: Sequence[View]) -> None:
        model = copy.deepcopy(observation.model).double()
        config = getattr(model, "config", None)
        self.heads = int(getattr(config, "num_attention_heads", None) or 1)
        modules = dict(model.named_modules())
        names = {module: name for name, module in observation.model.named_modules()}
        self._observation = replace(observation, model=model)
        self._projections = [
            replace(
                view.projections, modules=tuple(modules[names[m]] for m in view.projections.modules)
            )
            for view in views[:2]
        ]
        self._filler, other_token = two_tokens(observation)
        self._pair = {0: torch.tensor([self._filler]), 1: torch.tensor([other_token])}
        self._values: dict[tuple[int, ...], Tensor] = {}
        self._equations = [_equations_of(view) for view in views[:2]]
        self.is_average = self._projections[0].width % self.heads == 0 and self._gives_averages()
        self._norm = self._normalization() if self.is_average and len(views) > 1 else None
        self.num_equations = sum(map(len, self._equations[: 1 if self._norm is None else 2]))

    def values(self, place: int, ids: Tensor) -> Tensor:
        """Return what the attention takes of ids `(K,)` at a place, `(K, heads, D)`."""
        key = (place, *ids.tolist())
        if key not in self._values:
            self._values[key] = self.average(place, {place: ids})
        return self._values[key]

    def average(self, query: int, ids: Mapping[int, Tensor]) -> Tensor:
        """Return the output at a place where only these tokens are attended, `(K, heads, D)`.

        Args:
            query: The place.
            ids: Ids `(K,)` by place, that one among them.
        """
        return self._inputs(self._projections[0], query, ids).unflatten(-1, (self.heads, -1))

    def weights(
        self,
        query: int,
        known_ids: Mapping[int, int],
        candidates: Mapping[int, Tensor],
        clock: Clock = ENDLESS,
    ) -> list[Tensor]:
        """Return, for each place, its candidates' attention weights relative to all known tokens.

        They are `(K, heads)`, in units of the known tokens' sum.

        Args:
            query: The place that looks, where a known token stands.
            known_ids: Known tokens by place.
            candidates: Ids `(K,)` by place.
            clock: A clock; when it is over, the rest stays 0.
        """
        rows = torch.arange(max(map(len, candidates.values()), default=0))
        standing = {place: torch.full_like(rows, token) for place, token in known_ids.items()}
        of_known = self.average(query, {place: ids[:1] for place, ids in standing.items()})
        weights = [of_known.new_zeros(len(ids), self.heads) for ids in candidates.values()]
        # The values of a pass are independent: by far fewer than heads have entries, and, where one
        # word has one value everywhere, of other words at each place.
        size = max(1, of_known.shape[-1] // 4)
        if torch.allclose(self.values(0, self._pair[0]), self.values(1, self._pair[0])):
            size = min(size, *map(len, candidates.values()))
        numbered = list(enumerate(candidates.items()))
        for group in (numbered[start : start + size] for start in range(0, len(numbered), size)):
            if clock.must_stop():
                break
            picked = [(rows + number) % len(ids) for number, (_, ids) in group]
            tokens, values = dict(standing), [of_known.expand(len(rows), -1, -1)]
            for which, (_, (place, ids)) in zip(picked, group, strict=True):
                tokens[place] = ids[which]
                values.append(self.values(place, ids)[which])
            coefficients = _coefficients(torch.stack(values, -1), self.average(query, tokens))
            ratios = coefficients[..., 1:] / coefficients[..., :1].clamp(min=TINY**0.5)
            for column, (which, (number, _)) in enumerate(zip(picked, group, strict=True)):
                weights[number][which] = ratios[..., column].clamp(min=0)
        return weights

    def equations(self, query: int, token: int) -> tuple[Tensor, Tensor]:
        """Return A `(E, heads, D)` and b `(E,)` of A c + b = 0 for a possible output c at a place.

        Args:
            query: The place.
            token: The token that stands there.
        """
        matrix, constant = self._equations[0], self._equations[0].new_zeros(len(self._equations[0]))
        if self._norm is not None:
            ids, rows = torch.tensor([token]), self._norm.linear(self._equations[1])
            summed = self._inputs(self._norm.projections, query, {query: ids})[0]
            own_input = summed - self._norm.projection @ self.values(query, ids)[0].flatten()
            normalized_rows = rows @ self._norm.projection
            scale = matrix.norm() / normalized_rows.norm().clamp(min=TINY)
            matrix = torch.cat([matrix, scale * normalized_rows])
            constant = torch.cat([constant, scale * (rows @ own_input)])
        return matrix.unflatten(-1, (self.heads, -1)), constant

    def _inputs(self, projections: Projections, place: int, ids: Mapping[int, Tensor]) -> Tensor:
        """Return the layer input at a place where only these tokens are attended, `(K, H)`."""
        device = self._observation.device
        count = len(next(iter(ids.values())))
        rows = torch.full((count, max(ids) + 1), self._filler, device=device)
        mask = torch.zeros_like(rows)
        for other, tokens in ids.items():
            rows[:, other], mask[:, other] = tokens.to(device), 1
        chunk = max(1, CHUNK // rows.shape[1])
        inputs = [
            all_inputs(self._observation, [projections], row_chunk, mask_chunk)[0][:, place]
            for row_chunk, mask_chunk in zip(rows.split(chunk), mask.split(chunk), strict=True)
        ]
        return torch.cat(inputs).cpu()

    def _gives_averages(self) -> bool:
        values = torch.stack([self.values(place, ids) for place, ids in self._pair.items()], -1)
        average = self.average(0, self._pair)
        coefficients = _coefficients(values, average)
        averages, sums = (values @ coefficients[..., None])[..., 0], coefficients.sum(-1)
        return torch.allclose(averages, average) and torch.allclose(sums, torch.ones_like(sums))

    def _normalization(self) -> _Normalization | None:
        """Return the normalization in front of the second view, if nothing else is between."""
        projection = self._projections[0].modules[0]
        width = self._projections[1].width
        if type(projection) is not nn.Linear or projection.out_features != width:
            return None
        outputs: dict[nn.Module, Tensor] = {}
        modules = self._observation.model.modules()
        layers = [m for m in modules if getattr(getattr(m, "weight", None), "ndim", 0) == 1]

        def note(layer: nn.Module, args: Any, output: Any) -> None:
            outputs.setdefault(layer, output)

        alone, both = {0: self._pair[0]}, self._pair
        with hooked(layer.register_forward_hook(note) for layer in layers):
            normalized = self._inputs(self._projections[1], 0, both)[0]
        for layer, output in outputs.items():
            if output.dim() == 3 and torch.equal(output[0, 0].cpu(), normalized):
                norm = _Normalization(
                    layer, replace(self._projections[1], modules=(layer,)), projection
                )
                groups = self._projections[0], norm.projections
                (average, summed), (average_of_both, summed_both) = (
                    [self._inputs(group, 0, ids)[0] for group in groups] for ids in (alone, both)
                )
                moved = norm.projection @ (average_of_both - average)
                is_sum = torch.allclose(summed + moved, summed_both)
                if is_sum and torch.allclose(norm(summed_both), normalized):
                    return norm
        return None


class _Normalization:
    """A normalization: shift + scale ∘ u / size(u), of u centered or not."""

    def __init__(self, layer: nn.Module, projections: Projections, projection: nn.Linear) -> None:
        self.projections, self.projection = projections, projection.weight.detach().cpu()
        self.scale: Tensor = layer.weight.detach().cpu()  # type: ignore[operator]
        bias = getattr(layer, "bias", None)
        self.shift = torch.zeros_like(self.scale) if bias is None else bias.detach().cpu()
        self.is_centered = isinstance(layer, nn.LayerNorm)

    def __call__(self, summed: Tensor) -> Tensor:
        """Return the normalized vector, without what is added against a division by zero."""
        centered = summed - summed.mean() * self.is_centered
        return self.shift + self.scale * centered / centered.square().mean().sqrt()

    def linear(self, equations: Tensor) -> Tensor:
        """Return equations of what is normalized, `(E, H)`, from those of the result.

        The size is not known, so that A (shift + u / size) = 0 says that A u is along A shift.
        """
        along = equations @ self.shift
        along = along / along.norm().clamp(min=TINY)
        rows = (equations - along[:, None] * (along @ equations)) * self.scale
        return rows - rows.mean(1, keepdim=True) * self.is_centered


def _coefficients(values: Tensor, averages: Tensor) -> Tensor:
    """Return the coefficients `(..., N)` of values `(..., D, N)` in averages `(..., D)`."""
    return torch.linalg.lstsq(values, averages[..., None]).solution[..., 0]


def _equations_of(view: View) -> Tensor:
    """Return equations `(E, H)` of what lies in a view's span."""
    directions = view.directions.cpu().double()
    full = torch.linalg.qr(directions.T, mode="complete").Q
    rows = full[:, len(directions) :].T * view.space.columns.cpu().double()
    return rows / rows.norm().clamp(min=TINY) * math.sqrt(len(rows))
