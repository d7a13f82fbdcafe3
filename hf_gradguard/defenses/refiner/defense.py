"""Refiner, which shares the gradient of robust data that looks like noise.

The weighted form, and with it the published one, is in published.py. Samples that are drawn are in
sketch.py.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ...gradient_map import GradientMap, Tensors
from ...gradient_map.domain import domain_of_model
from ...gradient_map.random_batch import synthetic_samples
from ...networks.loading import check_digest
from ...networks.trial import name_of
from ...randomness import Stream
from ..base import (
    DefenseFacts,
    Message,
    Reader,
    cast_like,
    check_range,
    check_whole,
    norm,
    nothing_of,
    true_gradient,
)
from ..feedback import BiasedDefense, check_min_batches
from ..mechanism import Fitted, Mechanism
from ..sketch import (
    SpecialTokens,
    SyntheticSamples,
    check_embeddings_stay,
    check_samples,
    free_positions,
)
from .published import (
    OPTIMIZERS,
    Descent,
    Memory,
    Pixels,
    RobustData,
    Words,
    brought_near,
    noise_ratio_of_samples,
    try_on_batch,
    utility_weights,
)

Objective = Literal["cosine", "weighted"]

DEFAULTS: dict[str, dict[str, Any]] = {
    "cosine": {
        "samples": 16, "factors": "sample", "iterations": 2, "beta": 0.0, "learning_rate": 0.2,
        "error_feedback": True,
    },
    "weighted": {
        "alpha": 0.6, "beta": 1.0, "tau": 0.95, "iterations": 10, "optimizer": "adam",
        "learning_rate": 0.01, "normalize": True, "element_wise": True, "error_feedback": False,
    },
}  # fmt: skip
"""By objective."""
ONLY = {
    "cosine": ("samples", "factors"),
    "weighted": (
        "alpha", "tau", "optimizer", "normalize", "element_wise", "epsilon", "relative_epsilon",
        "warm_start",
    ),
}  # fmt: skip
"""Settings that one objective alone has."""
_UNSET = {"warm_start": 0}


_PINS = ("revision", "sha256")


@dataclass
class _Loaded:
    """An evaluation network that all clients of a process share.

    It also holds the version of the embeddings that the network was last compared with, since
    hashing a matrix takes longer than a step.
    """

    network: Any
    checked: tuple[int, int] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Loaded:
        return self


@dataclass
class Refiner(BiasedDefense):
    """Shares the gradient of robust data, which look like noise, in place of the client's.

    With `objective="cosine"` robust data begin as random samples with random labels, which share
    nothing with the batch but its shape. Adam moves them, texts in the space of embeddings, until
    the weighted sum of their gradients points where the client's does. What it leaves out, later
    messages make up for. No evaluation network is needed. (`gradient_sketch` leaves the samples
    where they were drawn.)

    `objective="weighted"` is nearer to the paper: the batch's own data, blended with noise, moves
    toward what an evaluation network takes for noise, while a weighted distance holds its gradient.
    In a text only words move: padding and the tokenizer's special tokens keep their embeddings. The
    Trainer logs the fraction of the words that is hidden (`defense/movable_share`); under 0.9
    nothing is shared. An image stays in its pixel range. All samples of a batch are refined
    together, since they share one gradient. A network of `hf_gradguard.networks` is tried before it
    is trusted: `prepare` sees that it knows noise, and each client's first batch that it rises from
    that data to noise. A network of a class of your own is your code, and is not tried.
    `refiner_published` has the paper's own settings.

    Settings that are left out are the objective's own (`DEFAULTS`), and those that are of the other
    objective are refused.

    Args:
        evaluation_network: A network of `hf_gradguard.networks`, or where to load it from, which
            `prepare` does, or the first call. If it is left out and needed, `prepare` finds one
            that fits the model.
        revision: The revision of its Hub repository; a commit pins it.
        sha256: The hash of its model.safetensors: any other is refused.
        objective: `"cosine"` or `"weighted"`. Default: "cosine", or "weighted" if a setting is
            given that only this form has, or an evaluation network.
        alpha: "weighted": the fraction of noise in the start (1-α) x + α v. v is uniform over the
            pixel range, or embeddings of random tokens. (The paper has 0.5, at which a third of a
            text's words stay where they are.)
        beta: The weight of D.
        tau: "weighted": the weight of a layer relative to the one before it.
        iterations: The number of steps, at least 1.
        learning_rate: The rate of a step: "weighted", in the input's unit (text models learn more
            with 0.001, and hide less); "cosine", in units of its root mean square, falling to 0.
        normalize: "weighted": whether to divide UM by Σ ‖w ⊙ g‖². `False` is the formula as
            printed.
        element_wise: "weighted": `False` leaves |g ⊙ θ| out of w, for ablation.
        epsilon: "weighted": share g + ε (g(x*) - g)/‖g(x*) - g‖ where g(x*) is farther than ε from
            g. **With ε far below ‖g‖ this is the true gradient but for ε, and leaks like it.**
        relative_epsilon: ε in units of ‖g‖.
        warm_start: "weighted": how many examples' robust data to remember and start from at their
            next visit, with half the iterations. An example is known by its content.
        public_text: Text that an evaluation network may be trained on when none fits: a file, or a
            Hub name. Default: WikiText-2.
        image_mean: What was subtracted from pixels in [0, 1], per channel. The Trainer asks the
            image processor.
        image_std: What they were divided by afterwards, per channel.
        samples: "cosine": the number of robust samples that a message is made of. Default: 16.
        factors: "cosine": how many weights their gradients are summed with: one per `"sample"`
            (default), or one per `"message"`.
        optimizer: "weighted": `"adam"`, or `"sgd"`, plain gradient descent as in the paper.
        error_feedback: Whether to use error feedback, as for all biased defenses; on by default
            with "cosine".
        min_batches: k in 1 to 255. With error feedback a message is made of the sum of k batches'
            gradients or more, so a client's first k-1 messages are empty. Default: 2; with 1 the
            first one is fitted to one batch's own gradient.
    """

    name: ClassVar[str] = "refiner"
    evaluation_network: Any = None
    revision: str | None = None
    sha256: str | None = None
    objective: Objective | None = None
    alpha: float | None = None
    beta: float | None = None
    tau: float | None = None
    iterations: int | None = None
    learning_rate: float | None = None
    normalize: bool | None = None
    element_wise: bool | None = None
    epsilon: float | None = None
    relative_epsilon: float | None = None
    warm_start: int = 0
    public_text: str | None = None
    image_mean: list[float] | None = None
    image_std: list[float] | None = None
    samples: int | None = None
    factors: Literal["message", "sample"] | None = None
    optimizer: Literal["adam", "sgd"] | None = None
    _: KW_ONLY
    error_feedback: bool | None = None  # type: ignore[assignment]
    min_batches: int = 2

    def __post_init__(self) -> None:
        take_defaults(self)
        check_settings(self)
        network = self.evaluation_network
        # The settings keep a name: what it stands for is loaded once, and clients share it.
        self._loads = _Loaded(None if isinstance(network, str) else network)
        self._special = SpecialTokens()
        self._processor: tuple[Any, Any] = (None, None)  # an image processor's mean and deviation

    @property
    def facts(self) -> DefenseFacts:
        published = self.objective == "weighted"
        return replace(
            super().facts,
            needs_second_order=published,
            post_processes=not published,
            replaces_gradient=published,
        )

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The ids of the tokenizer's special tokens, which are public."""
        return self._special.ids

    @property
    def uses_network(self) -> bool:
        """Whether what is shared depends on an evaluation network."""
        return self.objective == "weighted" or self.beta != 0

    def _mechanism(self, message: Message) -> Mechanism | None:
        """Return the fitting that the message comes from; `None` if the objective fits nothing.

        How far samples move depends on the gradient. An attacker who draws other samples and leaves
        them unmoved spans somewhat less of it, so what such an attacker finds is a bound from
        below.
        """
        if self.objective != "cosine":
            return None
        settings: Any = self
        return Mechanism(fitted=Fitted(settings.samples, settings.factors, self.special_ids))

    def informed(self) -> dict[str, Any]:
        return {"restarts": 4}  # it hides where it started from

    def prepare(self, model: nn.Module, processing_class: Any = None) -> None:
        """Load the evaluation network, or find one if none was given, and try it on noise.

        It also takes the image processor's normalization, or the tokenizer's special tokens.
        """
        from ...networks import check_network, network_for

        self._special = SpecialTokens.of(processing_class)
        if "memory" in self.state:
            self.remember(memory=replace(self._memory, tried=None))
        self._processor = (None, None)
        if getattr(processing_class, "do_normalize", False):
            self._processor = (processing_class.image_mean, processing_class.image_std)
        if not self.uses_network and self.evaluation_network is None:
            return
        if self.network is None or self.evaluation_network is None:  # one is found for each model
            self._loads.network = network_for(model, processing_class, self.public_text)
        special = None if processing_class is None else self._special.ids
        check_network(self.network, domain_of_model(model).embedding(model), special)

    @property
    def _normalization(self) -> tuple[Any, Any]:
        return self._processor if self.image_mean is None else (self.image_mean, self.image_std)

    @property
    def network(self) -> Any:
        """The evaluation network, loaded when first asked for, or `None`."""
        if self._loads.network is None and self.evaluation_network is not None:
            from ...networks import load_network

            pins = {pin: getattr(self, pin) for pin in _PINS if getattr(self, pin) is not None}
            self._loads.network = load_network(self.evaluation_network, **pins)
        if (network := self._loads.network) is not None:
            check_digest(name_of(network), getattr(network, "sha256", None), self.sha256)
        return network

    @property
    def _memory(self) -> Memory:
        return self.state.get("memory") or Memory()

    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        robust = self.refine(gmap, generator)  # what cannot be refined is refused at once
        if self.error_feedback and self._residual.too_few:
            return nothing_of(gmap)
        if self.objective == "weighted":
            gradient = true_gradient(gmap)
            shared = brought_near(gradient, robust.gradient, self.bound(gradient))
            metrics = {"movable_share": robust.movable_share}
        else:
            shared, metrics = robust.gradient, {"fit": 1 - robust.utility_metric[-1]}
            if robust.noise_ratio:
                metrics["noise_ratio"] = robust.noise_ratio[-1]
        return Message(cast_like(shared, gmap), metrics=metrics)

    def bound(self, gradient: Tensors) -> float | None:
        """Return ε in the gradient's unit, or `None` if there is none."""
        if self.relative_epsilon is None:
            return self.epsilon
        return self.relative_epsilon * norm(gradient, None)

    def refine(self, gmap: GradientMap, generator: Stream) -> RobustData:
        """Return robust data for the map's batch, with the course of what is minimized and of D.

        Raises:
            ValueError: If an evaluation network is needed and there is none, if it does not
                distinguish this input from noise, or if the batch holds too little that could be
                refined.
        """
        check_embeddings_stay(gmap, self.name)
        has_network = self.uses_network or self.evaluation_network is not None
        network = self._network(gmap) if has_network else None
        if self.objective == "cosine":
            return self._fit_synthetic(gmap, network, generator)
        settings: Any = self  # settings that were left out have been filled in
        inputs = (
            Words(gmap, network, self._special)
            if gmap.embedding is not None
            else Pixels(gmap, *self._normalization)
        )
        version = self._loads.checked or (0, 0)
        if self._memory.tried != version:
            try_on_batch(gmap, network, inputs)
            if not inputs.has_few_words:  # which do not say much: then the next batch is tried too
                self.remember(memory=replace(self._memory, tried=version))
        gradient = true_gradient(gmap)
        weights = utility_weights(
            gmap, gradient, settings.tau, settings.element_wise, settings.normalize
        )
        x = gmap.input
        moved = (1 - settings.alpha) * x + settings.alpha * inputs.noise(x, generator)
        start = torch.where(inputs.free, moved, x)
        iterations = settings.iterations
        if self._memory.recall_(start, inputs):
            iterations = math.ceil(iterations / 2)
        descent = Descent(gmap, gradient, inputs, network, settings.beta, weights)
        optimizer = OPTIMIZERS[settings.optimizer]([start], lr=settings.learning_rate)
        refined = descent.run(start, iterations, optimizer)
        memory = self._memory.with_batch(refined.input, inputs, self.warm_start)
        self.remember(memory=memory)
        return refined

    def _fit_synthetic(self, gmap: GradientMap, network: Any, generator: Stream) -> RobustData:
        settings: Any = self
        synthetic = synthetic_samples(gmap, settings.samples, generator, self.special_ids)
        samples = SyntheticSamples(synthetic, true_gradient(gmap), settings.factors)

        def noise_ratio(x: Tensor) -> Tensor:
            return noise_ratio_of_samples(synthetic, network, x, *self._normalization)

        def brake(x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                penalty = -settings.beta * noise_ratio(x)
            return synthetic.slope_of(penalty, x, torch.ones_like(penalty)[None])[0]

        x, fit, cosines = samples.descend(
            settings.iterations,
            settings.learning_rate,
            free_positions(synthetic, self.special_ids),
            brake if settings.beta else None,
        )
        ratios = []
        if network is not None:
            with torch.no_grad():
                ratios = [float(noise_ratio(samples_at)) for samples_at in (synthetic.input, x)]
        return RobustData(x, fit.nearest, [1 - cosine for cosine in cosines], ratios, 1.0)

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
        # Without one of these it is of its owner's own class.
        model_type = str(getattr(getattr(network, "config", None), "model_type", ""))
        if model_type.startswith("gradguard_") and model_type != f"gradguard_{kind}_evaluation":
            raise ValueError(
                f"The model takes {kind} input, but the evaluation network is a "
                f"{type(network).__name__}. Give one for {kind} input."
            )
        if gmap.embedding is not None and hasattr(network, "check_embedding"):
            weight: Tensor = gmap.embedding.weight  # type: ignore[assignment]
            version = (weight.data_ptr(), weight._version)
            if self._loads.checked != version:
                network.check_embedding(weight)
                self._loads.checked = version
        return network.to(gmap.input.device).eval().requires_grad_(False)

    def state_readers(self) -> dict[str, Reader]:
        return super().state_readers() | {"memory": Memory.from_tensors}

    def settings(self) -> dict[str, Any]:
        settings = super().settings()
        network = settings.pop("evaluation_network", self._loads.network)
        if network is None:
            return settings
        name = network if isinstance(network, str) else network.name_or_path or "unnamed"
        pins = {pin: getattr(self._loads.network, pin, None) for pin in _PINS}
        return settings | {"evaluation_network": name} | {k: v for k, v in pins.items() if v}


@dataclass
class RefinerPublished(Refiner):
    """Refines exactly as the paper describes.

    It has α = 0.5, β = 1, τ = 0.95, UM as printed, and ι = 10 steps of gradient descent at a rate
    of 1, without error feedback. The paper varies its strength by ε (0.01 to 0.9; 0.1 in its
    ablations) and names no default, so `epsilon` is left to you. It needs an evaluation network.
    Attackers recovered 15 dB of an image at these α, β and τ (docs/findings/refiner.md), and on
    text it hardly learns (docs/findings/refiner.md). `refiner` is the form to train with.

    Reference: "Refiner" (2025), Eq. 2 to 5, Section 5.1, Figure 5 (rate), Appendix J.

    Example:
        >>> make_defense("refiner_published").alpha
        0.5
    """

    name: ClassVar[str] = "refiner_published"
    facts = Refiner.facts
    objective: Objective | None = "weighted"
    alpha: float | None = 0.5
    optimizer: Literal["adam", "sgd"] | None = "sgd"
    learning_rate: float | None = 1.0
    normalize: bool | None = False


def take_defaults(refiner: Any) -> None:
    """Fill in the settings that were left out.

    Without an objective it is "cosine", or "weighted" if something is set that only this form has
    or needs.

    Raises:
        ValueError: If the objective is unknown, or a setting belongs to the other one.

    Example:
        >>> make_defense("refiner").objective, make_defense("refiner", alpha=0.5).objective
        ('cosine', 'weighted')
    """
    if refiner.objective is None:
        has_network = refiner.evaluation_network is not None and not _settings_given(
            refiner, "cosine"
        )
        refiner.objective = (
            "weighted" if has_network or _settings_given(refiner, "weighted") else "cosine"
        )
    objective = refiner.objective
    if objective not in DEFAULTS:
        names = " or ".join(map(repr, DEFAULTS))
        raise ValueError(f"objective must be {names}, but is {objective!r}.")
    (other_objective,) = DEFAULTS.keys() - {objective}
    if foreign := _settings_given(refiner, other_objective):
        raise ValueError(
            f"{foreign[0]} is a setting of objective={other_objective!r}, and objective is "
            f"{objective!r}. Leave it out, or give objective={other_objective!r}."
        )
    for name, value in DEFAULTS[objective].items():
        if getattr(refiner, name) is None:
            setattr(refiner, name, value)


def check_settings(refiner: Any) -> None:
    """Refuse settings that are out of range, or do not go together.

    Raises:
        ValueError: If so; the message has the setting's name.
    """
    if refiner.objective == "weighted":
        if refiner.optimizer not in OPTIMIZERS:
            names = " or ".join(map(repr, OPTIMIZERS))
            raise ValueError(f"optimizer must be {names}, but is {refiner.optimizer!r}.")
        check_range("alpha", refiner.alpha, 0, 1)
        check_range("tau", refiner.tau, 0, math.inf, above=True)
    else:
        if refiner.iterations == 0:
            raise ValueError(
                "iterations must be at least 1: refiner refines. Samples that stay where they were "
                "drawn are gradient_sketch."
            )
        check_samples(refiner.samples, refiner.factors, ("message", "sample"))
    check_range("beta", refiner.beta, 0, math.inf)
    check_min_batches(refiner.min_batches)
    check_range("learning_rate", refiner.learning_rate, 0, math.inf, above=True)
    for name, least in (("iterations", 1), ("warm_start", 0)):
        check_whole(name, getattr(refiner, name), least)
    if refiner.epsilon is not None and refiner.relative_epsilon is not None:
        raise ValueError("Give epsilon or relative_epsilon, not both.")
    for name in ("epsilon", "relative_epsilon"):
        if getattr(refiner, name) is not None:  # at 0 it would share the true gradient
            check_range(name, getattr(refiner, name), 0, math.inf, above=True)
    if (refiner.image_mean is None) != (refiner.image_std is None):
        raise ValueError("Give image_mean and image_std together, or neither.")
    network = refiner.evaluation_network
    if network is not None and not isinstance(network, str) and not hasattr(network, "noise_ratio"):
        raise ValueError(
            "evaluation_network must be a network of hf_gradguard.networks or where to load it "
            f"from, but is a {type(network).__name__}."
        )
    if refiner.revision is not None and not isinstance(network, str):
        raise ValueError("revision is of a Hub repository: give its name in evaluation_network")


def _settings_given(refiner: Any, objective: str) -> list[str]:
    """Settings that are set, of those that one objective alone has."""
    return [name for name in ONLY[objective] if getattr(refiner, name) != _UNSET.get(name)]
