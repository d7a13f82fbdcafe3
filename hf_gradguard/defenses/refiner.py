"""Refiner: share the gradient of robust data, which looks like noise.

    x* = argmin UM(x*) - β D(x*)
    UM(x*) = Σ_l ‖w_l ⊙ (g_l(x*) - g_l(x))‖²,   w_l = |g_l(x) ⊙ θ_l| τ^l

UM, the utility metric, is small where the gradient stays what it was; l = 1 is the layer nearest
the input. D in [0, 1] is an evaluation network's prediction of how much of its input is noise.

Reference: "Refiner" (2025), Eq. 2 to 5 and Appendices F and J. As printed, UM holds |g θ|² and is
many orders of magnitude below β D, so β = 1 would ignore it; by default it is divided by Σ_l ‖w_l ⊙
g_l(x)‖², which makes it a relative error.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..gradient_map import GradientMap, Tensors
from ..gradient_map.domain import domain_of_model
from ..gradient_map.layers import layer_numbers
from ..networks.loading import check_digest
from ..networks.trial import name_of
from ..randomness import Stream
from .base import cast_like, check_whole, is_number, norm, true_gradient
from .feedback import BiasedDefense
from .message import Message
from .robust_input import Pixels, SpecialTokens, Words, try_on_batch

_PINS = ("revision", "sha256")


@dataclass
class RobustData:
    """What refining a batch found.

    Args:
        input: x*, in the shape of the map's input.
        gradient: g(x*).
        utility_metric: UM at the start and after every iteration.
        noise_ratio: D likewise, averaged over the batch.
        movable_share: Of the batch's content, the share that was hidden.
    """

    input: Tensor
    gradient: Tensors
    utility_metric: list[float]
    noise_ratio: list[float]
    movable_share: float


@dataclass
class Refiner(BiasedDefense):
    """Gradient of robust data: found by Adam on the continuous input from a start that is blended
    with noise.

    Of a text, only words move: padding and the tokenizer's special tokens keep their embeddings.
    The Trainer logs the share of the words that is hidden (`defense/movable_share`); under 0.9
    nothing is shared. An image stays in its pixel range. All samples of a batch are refined
    together, since they share one gradient.

    The evaluation network decides what is shared. One of `hf_gradguard.networks` is tried before
    it is believed: `prepare` sees that it knows noise, and each client's first batch that it rises
    from that data to noise. A network of a class of your own is your code, and is not tried.

    Args:
        evaluation_network: A network of `hf_gradguard.networks`, or where to load it from, which
            `prepare` does, or the first call. Left out, `prepare` finds one that fits the model.
        revision: Of its Hub repository; a commit pins it.
        sha256: Of its model.safetensors: any other is refused.
        alpha: Share of noise in the start (1-α) x + α v. v is uniform over the pixel range, or
            embeddings of random tokens. (The paper has 0.5, at which a third of a text's words stay
            where they are.)
        beta: Weight of D against UM.
        tau: Weight of a layer relative to the one before it.
        iterations: Steps of Adam. Each costs 7/3 plain gradients and one pass of the evaluation
            network.
        learning_rate: Of Adam, in the input's unit. Text models learn more with 0.001, and hide
            less.
        normalize: Divide UM by Σ ‖w ⊙ g‖². `False` is the formula as printed.
        element_wise: `False` leaves |g ⊙ θ| out of w, for ablation.
        epsilon: Share g + ε (g(x*) - g)/‖g(x*) - g‖ where g(x*) is farther than ε from g. **With ε
            far below ‖g‖ this is the true gradient but for ε, and leaks like it.**
        relative_epsilon: ε in units of ‖g‖.
        warm_start: How many examples' robust data to remember and start from at their next visit,
            with half the iterations. An example is known by its content.
        public_text: Text that an evaluation network may be trained on when none fits: a file, or a
            Hub name. Default: WikiText-2.
        image_mean: Per channel, what was subtracted from pixels in [0, 1]. The Trainer asks the
            image processor.
        image_std: Per channel, what they were divided by afterwards.
    """

    name: ClassVar[str] = "refiner"
    evaluation_network: Any = None
    revision: str | None = None
    sha256: str | None = None
    alpha: float = 0.6
    beta: float = 1.0
    tau: float = 0.95
    iterations: int = 10
    learning_rate: float = 0.01
    normalize: bool = True
    element_wise: bool = True
    epsilon: float | None = None
    relative_epsilon: float | None = None
    warm_start: int = 0
    public_text: str | None = None
    image_mean: list[float] | None = None
    image_std: list[float] | None = None

    def __post_init__(self) -> None:
        _check_range("alpha", self.alpha, 0, 1)
        _check_range("beta", self.beta, 0, math.inf)
        _check_range("tau", self.tau, 0, math.inf, above=True)
        _check_range("learning_rate", self.learning_rate, 0, math.inf, above=True)
        for name, least in (("iterations", 1), ("warm_start", 0)):
            check_whole(name, getattr(self, name), least)
        if self.epsilon is not None and self.relative_epsilon is not None:
            raise ValueError("Give epsilon or relative_epsilon, not both.")
        for name in ("epsilon", "relative_epsilon"):
            if getattr(self, name) is not None:  # at 0 it would share the true gradient
                _check_range(name, getattr(self, name), 0, math.inf, above=True)
        if (self.image_mean is None) != (self.image_std is None):
            raise ValueError("Give image_mean and image_std together, or neither.")
        given = self.evaluation_network
        if given is not None and not isinstance(given, str) and not hasattr(given, "noise_ratio"):
            raise ValueError(
                "evaluation_network must be a network of hf_gradguard.networks or where to load it "
                f"from, but is a {type(given).__name__}."
            )
        if self.revision is not None and not isinstance(given, str):
            raise ValueError("revision is of a Hub repository: give its name in evaluation_network")
        # The settings keep a name: what it stands for is loaded once, and clients share it.
        self._loaded = None if isinstance(given, str) else given
        self._remembered: OrderedDict[str, Tensor] = OrderedDict()
        self._special, self._tried = SpecialTokens(), False
        self._checked: tuple[int, int] | None = None

    @property
    def needs_jacobian(self) -> bool:
        return True

    def prepare(self, model: nn.Module, processing_class: Any = None) -> None:
        """Load the evaluation network, or find one if none was given, and try it on noise; take
        the image processor's normalization, or the tokenizer's special tokens.
        """
        from ..networks import check_network, network_for

        if self.image_mean is None and getattr(processing_class, "do_normalize", False):
            self.image_mean, self.image_std = (
                list(processing_class.image_mean),
                list(processing_class.image_std),
            )
        if self.network is None or self.evaluation_network is None:  # one is found for each model
            self._loaded = network_for(model, processing_class, self.public_text)
        self._special, self._tried = SpecialTokens.of(processing_class), False
        special = None if processing_class is None else self._special.ids
        check_network(self.network, domain_of_model(model).embedding(model), special)

    @property
    def network(self) -> Any:
        """The evaluation network, loaded when it is first asked for; `None` if none was given or
        found.
        """
        if self._loaded is None and self.evaluation_network is not None:
            from ..networks import load_network

            pins = {pin: getattr(self, pin) for pin in _PINS if getattr(self, pin) is not None}
            self._loaded = load_network(self.evaluation_network, **pins)
        if self._loaded is not None:
            check_digest(name_of(self._loaded), getattr(self._loaded, "sha256", None), self.sha256)
        return self._loaded

    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        robust = self.refine(gmap, generator)
        shared = self.project(true_gradient(gmap), robust.gradient)
        return Message(cast_like(shared, gmap), figures={"movable_share": robust.movable_share})

    def project(self, gradient: Tensors, shared: Tensors) -> Tensors:
        """g + ε (g(x*) - g)/‖g(x*) - g‖ where `shared`, g(x*), is farther than ε from `gradient`,
        g. (Appendix J.)
        """
        bound = (
            self.epsilon
            if self.relative_epsilon is None
            else self.relative_epsilon * norm(gradient)
        )
        distance = norm({name: shared[name] - g for name, g in gradient.items()})
        if bound is None or distance <= bound:
            return shared
        return {name: g + (shared[name] - g) * (bound / distance) for name, g in gradient.items()}

    def refine(self, gmap: GradientMap, generator: Stream) -> RobustData:
        """Robust data for the map's batch, with the course of UM and D.

        Raises:
            ValueError: If there is no evaluation network, if it does not tell this input from
                noise, or if the batch holds too little that could be refined.
        """
        network = self._network(gmap)
        inputs = (
            Words(gmap, network, self._special)
            if gmap.embedding is not None
            else Pixels(gmap, self.image_mean, self.image_std)
        )
        if not self._tried:  # a few words do not say much: then the next batch is tried too
            try_on_batch(gmap, network, inputs)
            self._tried = not inputs.few
        gradient = true_gradient(gmap)
        weights = self._weights(gmap, gradient)
        digests = inputs.digests() if self.warm_start else []
        x, iterations = self._start(gmap.input, inputs, digests, generator)
        optimizer = torch.optim.Adam([x.requires_grad_()], lr=self.learning_rate)
        metrics, ratios = [], []
        for _ in range(iterations):
            metric = _weighted_distance(gmap.gradient_at(x, create_graph=True), gradient, weights)
            ratio = inputs.noise_ratio(network, x)
            (slope,) = gmap.input_gradient(metric - self.beta * ratio, x)
            x.grad = slope * inputs.free
            metrics.append(float(metric.detach()))
            ratios.append(float(ratio.detach()))
            with torch.no_grad():
                optimizer.step()
                inputs.project_(x)
        x = x.detach()
        there = gmap.gradient_at(x)
        with torch.no_grad():
            metrics.append(float(_weighted_distance(there, gradient, weights)))
            ratios.append(float(inputs.noise_ratio(network, x)))
        self._remember(x, inputs, digests)
        return RobustData(x, there, metrics, ratios, inputs.movable_share)

    def __deepcopy__(self, memo: dict[int, Any]) -> Refiner:
        """A client's own: what it remembers is copied, the network, which never changes, is not."""
        memo[id(self.network)] = self.network
        copied = copy.copy(self)
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied

    def _network(self, gmap: GradientMap) -> Any:
        """The evaluation network, on the input's device and never trained."""
        kind = "text" if gmap.embedding is not None else "image"
        network = self.network
        if network is None:
            raise ValueError(
                "refiner needs an evaluation network: give evaluation_network, a network of "
                "hf_gradguard.networks or where to load it from. (GradGuardTrainer finds one by "
                "itself.)"
            )
        if network.config.model_type != f"gradguard_{kind}_evaluation":
            raise ValueError(
                f"The model takes {kind} input, but the evaluation network is a "
                f"{type(network).__name__}. Give one for {kind} input."
            )
        if gmap.embedding is not None:
            weight: Tensor = gmap.embedding.weight  # type: ignore[assignment]
            if any(parameter is weight for parameter in gmap.parameters.values()):
                raise ValueError(
                    "refiner never shares the token embeddings: their gradient names the words, "
                    "and training them changes the space that the evaluation network knows. Leave "
                    "share_input_embeddings at False."
                )
            version = (weight.data_ptr(), weight._version)
            if self._checked != version:  # hashing the matrix takes longer than a step
                network.check_embedding(weight)
                self._checked, self._tried = version, False
        return network.to(gmap.input.device).eval().requires_grad_(False)

    def _weights(self, gmap: GradientMap, gradient: Tensors) -> Tensors:
        """w, divided by ‖w ⊙ g‖ if UM is to be relative."""
        layers = layer_numbers(gmap.parameters)
        weights = {}
        for name, g in gradient.items():
            weight = (
                (g * gmap.parameters[name].detach()).abs()
                if self.element_wise
                else torch.ones_like(g)
            )
            weights[name] = weight * self.tau ** layers[name]
        size = (
            norm({name: weights[name] * g for name, g in gradient.items()})
            if self.normalize
            else 1.0
        )
        return {name: weight / (size or 1.0) for name, weight in weights.items()}

    def _start(
        self, x: Tensor, inputs: Words | Pixels, digests: list[str], generator: Stream
    ) -> tuple[Tensor, int]:
        """(1-α) x + α v, or what was found at the examples' last visit; and how many iterations to
        go from there.
        """
        start = torch.where(
            inputs.free, (1 - self.alpha) * x + self.alpha * inputs.noise(x, generator), x
        )
        remembered = [self._remembered.get(key) for key in digests]
        for row, last in enumerate(remembered):
            if last is not None:
                inputs.recall_(start, row, last)
        known = bool(remembered) and all(last is not None for last in remembered)
        return start, math.ceil(self.iterations / 2) if known else self.iterations

    def _remember(self, x: Tensor, inputs: Words | Pixels, digests: list[str]) -> None:
        for row, key in enumerate(digests):
            self._remembered[key] = inputs.memory(x, row).cpu().clone()
            self._remembered.move_to_end(key)
        while len(self._remembered) > self.warm_start:
            self._remembered.popitem(last=False)

    def state_dict(self) -> Tensors:
        return super().state_dict() | {
            f"robust.{index}.{key}": data
            for index, (key, data) in enumerate(self._remembered.items())
        }

    def load_state_dict(self, state: Tensors) -> None:
        robust = {key: data for key, data in state.items() if key.startswith("robust.")}
        super().load_state_dict({key: t for key, t in state.items() if key not in robust})
        ordered = sorted(robust.items(), key=lambda item: int(item[0].split(".")[1]))
        self._remembered = OrderedDict((name.split(".")[2], data.cpu()) for name, data in ordered)

    def settings(self) -> dict[str, Any]:
        settings = super().settings()
        given = settings.pop("evaluation_network", self._loaded)
        if given is None:
            return settings
        name = given if isinstance(given, str) else given.name_or_path or "unnamed"
        found = {pin: getattr(self._loaded, pin, None) for pin in _PINS}
        return settings | {"evaluation_network": name} | {k: v for k, v in found.items() if v}


def _weighted_distance(there: Tensors, here: Tensors, weights: Tensors) -> Tensor:
    """UM = Σ_l ‖w_l ⊙ (g_l(x*) - g_l(x))‖²."""
    return torch.stack(
        [(weights[name] * (there[name] - g)).square().sum() for name, g in here.items()]
    ).sum()


def _check_range(name: str, value: object, low: float, high: float, above: bool = False) -> None:
    if not is_number(value) or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        least = f"above {low}" if above else f"at least {low}"
        most = f" and at most {high}" if high < math.inf else ""
        raise ValueError(f"{name} must be a finite number {least}{most}, but is {value!r}.")
