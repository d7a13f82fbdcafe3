"""Behavior of a received model's layers on public inputs, whatever form their weights have.

Honest layers pass most samples on, by units that differ. Layers that were made to leak do not:
their units fire for few samples (Boenisch et al., "When the Curious Abandon Honesty", 2021), or all
measure one thing above different thresholds (Fowl et al., "Robbing the Fed", 2021), or attention
picks one token for each query. Each is compared with what honest layers do.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..gradient_map.replay import modes_kept

SAMPLES, LENGTH, AT_ONCE = 32, 16, 8  # probes, tokens of each, and probes of one pass
FEWEST_UNITS = 32
MOST_UNITS = 20_000  # of a layer that is looked at: more are words of a vocabulary
POSITIONS, COMPARED = 512, 256  # of all probes, at which so many units of a layer are compared
RARE, MOST_RARE = 0.25, 0.5  # probes that reach a unit, and units that so few reach: shares
REACHED = 0.01  # of the largest slope
VARIED = 0.05  # how much of drawn units' variety is the least
LEAST_VARIETY = 0.1
CLUSTERED, LEAST_ALIKE, COSINE = 0.125, 16, 0.8  # rows alike: their share, partners and cosine
ONE_HOT, PLACES = 0.9, 0.15  # largest weight of a query; places that queries choose, as a share
_LAYERS = nn.Linear | Conv1D | nn.Conv1d | nn.Conv2d | nn.Conv3d
_ATTENTIONS = ("attentions", "encoder_attentions", "decoder_attentions")


def examine_behavior(
    model: nn.Module, weights: Mapping[str, Tensor], probes: Mapping[str, Tensor]
) -> Iterator[tuple[str, str, str]]:
    """Find layers that behave on probes as layers made to leak do.

    Args:
        model: The model. Neither it nor its gradient is changed.
        weights: The weights `(out, in)` of the layers that are trained, by name.
        probes: Public inputs, as the model takes them.

    Yields:
        The check, the layer, and what it does.

    Example:
        >>> list(examine_behavior(model, {}, probe_inputs(model)[0]))
        []
    """
    behavior = _Behavior(model, weights)
    batches = {name: tensor.split(AT_ONCE) for name, tensor in probes.items()}
    for batch in zip(*batches.values(), strict=True):
        behavior.observe(dict(zip(batches, batch, strict=True)))
    for name, weight in weights.items():
        # a layer without thresholds of its own cannot say which samples reach a unit
        has_thresholds = getattr(model.get_submodule(name), "bias", None) is not None
        slopes = behavior.slopes[name] if has_thresholds else []
        rare = _rare_fraction(torch.cat(slopes)) if slopes else 0.0
        if rare > MOST_RARE:
            says = f"{rare:.0%} of its units pass on few of the public inputs: of a batch, "
            yield "single_samples", name, f"{says}the gradient of such a unit is of few samples."
        if len(weight) < FEWEST_UNITS:
            continue
        clustered = _clustered_fraction(weight)
        variety = behavior.variety(name) if has_thresholds else 1.0
        if clustered > CLUSTERED or variety < VARIED:
            says = f"{clustered:.0%} of its rows are similar, and on public inputs its units vary "
            yield "units_alike", name, f"{says}by {variety:.2f} of what drawn ones do."
    for name, (largest, places) in behavior.choices().items():
        if largest > ONE_HOT and places > PLACES:
            says = f"On public inputs the largest weight of a query is {largest:.2f}: what is "
            yield "single_tokens", name, f"{says}behind it reads tokens one by one."


class _Behavior:
    """The behavior of layers that was observed over all passes.

    Attributes:
        slopes: How strongly a sample's outputs depend on each unit, `(samples, units)`.
    """

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        self.model, self.weights = model, weights
        self.slopes: dict[str, list[Tensor]] = defaultdict(list)
        self._outputs: dict[str, list[Tensor]] = defaultdict(list)
        self._drawn: dict[str, list[Tensor]] = defaultdict(list)
        self._largest: dict[str, list[Tensor]] = defaultdict(list)
        self._places: dict[str, list[Tensor]] = defaultdict(list)
        self._generator = torch.Generator().manual_seed(0)

    def observe(self, batch: Mapping[str, Tensor]) -> None:
        """Observe one pass, forward and back."""
        outputs: dict[str, Tensor] = {}
        modules = dict(self.model.named_modules())
        hooks = [
            modules[name].register_forward_hook(self._observer(name, outputs))
            for name, weight in self.weights.items()
            if len(weight) <= MOST_UNITS
        ]
        try:
            with modes_kept(self.model) as all_modules, torch.enable_grad():
                for module in all_modules:
                    module.training = False
                with _with_attentions(self.model) as settings:
                    answer = self.model(**batch, **settings)
                logits = answer.logits if hasattr(answer, "logits") else answer[0]
                weighed = logits * self._normal(*logits.shape).to(logits)
                reached = [name for name, output in outputs.items() if output.requires_grad]
                ends = [outputs[name] for name in reached]
                slopes = torch.autograd.grad(weighed.sum(), ends, allow_unused=True) if ends else ()
        finally:
            for hook in hooks:
                hook.remove()
        for name, slope in zip(reached, slopes, strict=True):
            if slope is not None and len(slope) == len(logits):
                by_place = _units_last(modules[name], slope).flatten(1, -2)
                self.slopes[name].append(by_place.norm(dim=1).cpu())
        for kind in _ATTENTIONS:
            for place, attention in enumerate(getattr(answer, kind, None) or ()):
                if isinstance(attention, Tensor) and attention.dim() == 4:
                    self._choose(f"{kind}[{place}]", attention.detach().float())

    def _observer(self, name: str, outputs: dict[str, Tensor]) -> Any:
        def observe_layer(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if name in outputs or not isinstance(output, Tensor):
                return None  # of shared layers, their first use
            outputs[name] = output
            rows = _units_last(module, output).flatten(0, -2)
            generator = torch.Generator().manual_seed(len(rows))
            pick = torch.randperm(len(rows), generator=generator)[: POSITIONS * AT_ONCE // SAMPLES]
            units = torch.randperm(rows.shape[1], generator=generator)[:COMPARED].to(rows.device)
            self._outputs[name].append(rows[pick.to(rows.device)][:, units].cpu())
            if isinstance(module, nn.Linear | Conv1D):
                inputs = args[0].detach().float().flatten(0, -2)[pick.to(rows.device)]
                generator.manual_seed(1)
                drawn = torch.randn(inputs.shape[1], 64, generator=generator)
                self._drawn[name].append((inputs @ drawn.to(inputs)).cpu())
            return output.clone()  # what follows may work in place

        return observe_layer

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)

    def _choose(self, name: str, attention: Tensor) -> None:
        largest, place = attention.max(-1)
        is_chosen = torch.zeros_like(attention[..., 0, :]).scatter(-1, place, 1.0)
        self._largest[name].append(largest.flatten().cpu())
        self._places[name].append(is_chosen.mean(-1).flatten().cpu())

    def variety(self, name: str) -> float:
        """Return how differently units vary over probes, where 1 is how random units do."""
        if not self._drawn[name]:
            return 1.0
        units, drawn = torch.cat(self._outputs[name]), torch.cat(self._drawn[name])
        variety_of_drawn = 1 - _likeness(drawn)
        if variety_of_drawn < LEAST_VARIETY:  # inputs that are alike
            return 1.0
        return (1 - _likeness(units)) / variety_of_drawn

    def choices(self) -> dict[str, tuple[float, float]]:
        """Return for each attention how sharp it is, and how many places it chooses.

        The first number is the largest weight of the median query, the second the fraction of
        places that some query chooses.
        """
        return {
            name: (float(torch.cat(largest).median()), float(torch.cat(self._places[name]).mean()))
            for name, largest in self._largest.items()
        }


def _units_last(module: nn.Module, tensor: Tensor) -> Tensor:
    """Return outputs as `(samples, positions, units)`."""
    tensor = tensor.detach().float()
    if not isinstance(module, nn.Linear | Conv1D):
        tensor = tensor.movedim(1, -1)
    return tensor[:, None] if tensor.dim() == 2 else tensor


def _rare_fraction(slopes: Tensor) -> float:
    """Return the fraction of units that few samples reach; all reach slopes that merely differ."""
    slopes = slopes / slopes.norm(dim=1, keepdim=True).clamp(min=1e-30)
    slopes = slopes[:, slopes.any(0)]
    if slopes.shape[1] < FEWEST_UNITS // 2:
        return 0.0
    reached = (slopes > REACHED * slopes.max(0).values).float().mean(0)
    return float((reached < RARE).float().mean())


def _likeness(outputs: Tensor) -> float:
    """Return the mean squared correlation of two units."""
    centered = outputs - outputs.mean(0)
    unit = centered / centered.norm(dim=0).clamp(min=1e-30)
    squares = (unit.T @ unit).square()
    count = len(squares)
    return float((squares.sum() - squares.diagonal().sum()) / (count * (count - 1)))


def _clustered_fraction(weight: Tensor) -> float:
    """Return the fraction of rows that are similar, or opposite, to many others."""
    if weight.shape[1] < LEAST_ALIKE or len(weight) > MOST_UNITS:
        return 0.0
    unit = nn.functional.normalize(weight, dim=1)
    partners = [
        ((unit[start : start + 1024] @ unit.T).abs() > COSINE).sum(1)
        for start in range(0, len(unit), 1024)
    ]
    return float((torch.cat(partners) >= LEAST_ALIKE).float().mean())


@contextlib.contextmanager
def _with_attentions(model: Any) -> Iterator[dict[str, Any]]:
    """Let the model return its attention weights inside the context, if it can."""
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    takes = inspect.signature(model.forward).parameters
    if implementation is None or not {"output_attentions", "kwargs"} & {*takes}:
        yield {}
        return
    try:
        model.set_attn_implementation("eager")
        yield {"output_attentions": True}
    finally:
        model.set_attn_implementation(implementation)


def probe_inputs(model: nn.Module) -> list[dict[str, Tensor]]:
    """Return random inputs for models of texts or images; none for other models.

    Images come twice: in [0, 1], and of mean 0 and variance 1.

    Example:
        >>> [batch["input_ids"].shape for batch in probe_inputs(model)]
        [torch.Size([32, 16])]
    """
    config: Any = getattr(model, "config", None)
    main_input = getattr(model, "main_input_name", None)
    device = next(model.parameters()).device
    if main_input == "pixel_values":
        size = getattr(config, "image_size", None) or 32
        height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
        images = _draw_images(getattr(config, "num_channels", None) or 3, height, width)
        scales = images, (0.5 + 0.25 * images).clamp(0, 1)
        return [
            {main_input: scaled.to(device, next(model.parameters()).dtype)} for scaled in scales
        ]
    size = getattr(config, "vocab_size", None)
    if main_input != "input_ids" or not isinstance(size, int) or size < LENGTH:
        return []
    ids = torch.randint(5, size, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    pad, end = (getattr(config, f"{kind}_token_id", None) for kind in ("pad", "eos"))
    ids[
        torch.isin(ids, torch.tensor([token for token in (pad, end) if isinstance(token, int)]))
    ] = 4
    if isinstance(end, int) and end < size:
        ids[:, -1] = end
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = ids
    return [{name: tensor.to(device) for name, tensor in batch.items()}]


def _draw_images(channels: int, height: int, width: int) -> Tensor:
    """Draw images of mean 0 and variance 1, whose power falls with frequency as in photographs."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(SAMPLES, channels, height, width, generator=generator)
    squares = torch.fft.fftfreq(height)[:, None].square() + torch.fft.rfftfreq(width).square()
    amplitudes = (squares + 1 / (height * width)).rsqrt()
    smooth = torch.fft.irfft2(torch.fft.rfft2(noise) * amplitudes, s=(height, width))
    smooth = smooth + smooth.mean(1, keepdim=True)  # colors vary less than light
    return smooth / smooth.std()
