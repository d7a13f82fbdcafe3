"""What a defense is: a function from a gradient map to what is shared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..gradient_map import GradientMap, Tensors
from ..gradient_map.devices import devices
from ..gradient_map.law import Law
from ..gradient_map.per_sample.map import SampleMap
from ..randomness import Stream
from .message import Message, check_untouched, checked_message
from .tensors import check_finite


class Defense:
    """Base of all defenses. A subclass is a dataclass of its settings with one method, `protect`.

    A defense is pure: it touches neither the model nor `.grad`, and all its randomness comes from
    `generator`. What it remembers between calls is in `state_dict`, and is one client's: each
    client has a copy of its own. `hf_gradguard.testing.check_defense` checks all of this.

    Example:
        >>> message = make_defense("gaussian_noise", relative_scale=0.1)(gmap)
        >>> message.keys() == gmap.gradient().keys()
        True
    """

    name: ClassVar[str]
    first_order: ClassVar[bool] = False  # asks for the gradient alone, so takes any batch
    sharded: ClassVar[bool] = False  # takes a whole gradient's figures from this file's functions
    refused: ClassVar[dict[str, str]] = {
        "error_feedback": (
            "it shares the true gradient, or that with independent noise, which averages out over "
            "messages by itself. Fed back, each message would take back the noise of the one "
            "before, and their sum would show the sum of the gradients"
        )
    }
    """Settings that it has for a reason not."""

    def __call__(self, gmap: GradientMap, generator: Stream | None = None) -> Message:
        """What a client shares in place of its gradient.

        Args:
            gmap: The client's gradient map.
            generator: Source of all randomness. Default: a new one, with a key from the operating
                system.

        Returns:
            One finite tensor per shared parameter, in the parameters' shapes and types.

        Raises:
            FloatingPointError: If a true or a protected gradient is not finite. Names the
                parameter.
            TypeError: If what the defense made is no mapping of tensors, or for a
                `torch.Generator`, whose numbers can be predicted.
            ValueError: If a name is missing or unknown, or a shape, type or device differs.
            RuntimeError: If the defense wrote to what belongs to the map or the model.
        """
        if isinstance(generator, torch.Generator):
            raise TypeError(
                f"{self.name} takes no torch.Generator: whoever sees one message can compute its "
                "state, and with it all the noise. Leave generator out, or pass a "
                "hf_gradguard.randomness.Stream; in tests Stream.from_seeds(1)."
            )
        generator = generator or Stream()
        before = gmap.versions()
        message = checked_message(self.name, self.protect(gmap, generator), gmap)
        check_untouched(self.name, before, gmap.versions())
        check_finite(
            message,
            f"{self.name} made the gradient of {{}} not finite. Weaken its settings: {self}.",
        )
        return message if devices().size == 1 else message.of_part()

    def protect(self, gmap: GradientMap, generator: Stream) -> Mapping[str, Tensor]:
        """The defense itself. Implemented by subclasses: a `Message`, or a plain mapping if there
        is nothing to say of it.
        """
        raise NotImplementedError

    def prepare(self, model: nn.Module, processing_class: Any = None) -> None:
        """Load or make what the defense needs for this model and its tokenizer or image processor.
        Called before training, and again for every other model.
        """

    def at_step(self, step: int) -> None:
        """Told before a message, by who counts them, how many optimizer steps are finished."""

    @property
    def adds_gaussian_noise(self) -> bool:
        """Whether its messages carry `noise`: Gaussian noise of known covariance on the true
        gradient.
        """
        return False

    @property
    def noise_ratio(self) -> float | None:
        """The noise's norm over that of the gradient it is added to; `None` if settings do not say
        it.
        """
        return 0.0

    @property
    def exact(self) -> bool:
        """Whether its messages are `exact`: the true gradient wherever anything is transmitted."""
        return False

    @property
    def held(self) -> int:
        """How many of a client's first messages are empty."""
        return 0

    @property
    def needs_jacobian(self) -> bool:
        """Whether the next call differentiates twice, so that its map needs `second_order=True`."""
        return False

    @property
    def needs_input(self) -> bool:
        """Whether a call asks for the continuous input, or how the gradient depends on it. A
        subclass does, unless it says that it is of first order itself.
        """
        return not vars(type(self)).get("first_order", False)

    @property
    def needs_samples(self) -> bool:
        """Whether a call asks for what each sample adds to the gradient."""
        return False

    @property
    def only_processes(self) -> bool:
        """Whether it asks nothing of a client but the gradient it is given, so that noise in that
        bounds what its messages tell.
        """
        return not (self.needs_input or self.needs_samples)

    @property
    def shares_anew(self) -> bool:
        """Whether what it shares is a gradient of the client's own data whatever it is given: what
        an earlier defense of a chain did would be gone.
        """
        return False

    def gradient_map(
        self, model: nn.Module, batch: Mapping[str, Any], measured: bool = False, **sharing: Any
    ) -> GradientMap:
        """The gradient of a client's batch, with what the next call asks for and no more.

        Args:
            model: As for `GradientMap`.
            batch: As for `GradientMap`.
            measured: Whether its leakage is estimated too, which differentiates the input.
            **sharing: Of `GradientMap`: `loss_fn`, `share_input_embeddings`, `withhold`.

        Example:
            >>> defense = make_defense("pruning", ratio=0.9)
            >>> defense(defense.gradient_map(model, batch)).keys() == gmap.gradient().keys()
            True
        """
        return (SampleMap if self.needs_samples and not measured else GradientMap)(
            model,
            batch,
            second_order=self.needs_jacobian,
            needs_input=self.needs_input or measured,
            **sharing,
        )

    def check_sharded(self) -> None:
        """Refuse a client of several devices, each of which has a part of the gradient. A subclass
        is refused, unless it says that it is `sharded` itself.

        Raises:
            NotImplementedError: With the reason and the way out.
        """
        if not vars(type(self)).get("sharded", False):
            raise NotImplementedError(
                f"{type(self).__name__} ({self.name}) does not protect a sharded model: it asks "
                "for second derivatives or for a whole gradient, which no device holds, or does "
                "not say that it asks for neither (sharded = True in its class). Use "
                "gaussian_noise, laplace_noise, optimal_noise, dp_sgd, optimal_dp_sgd, pruning, "
                "optimal_pruning or quantization, or give each rank the whole model."
            )

    def law(self, message: Message) -> Law | None:
        """How its messages come from gradients, as whoever knows it and its settings knows it: what
        audits grant informed attackers. `None` where no attacker can follow it.

        Args:
            message: One of its own.
        """
        law = self._law(message)
        if message.carries:  # whatever else was done
            law = Law(fitted=None if law is None else law.fitted, left_out=True)
        if law is None or message.transmitted is None:
            return law
        return replace(law, kept=self.kept)

    def _law(self, message: Message) -> Law | None:
        """The same but for what was left out: by the message's own facts, its noise's covariance
        among them.
        """
        if message.noise is not None and message.noise.added is not None:
            return Law(noise="gaussian", variance=message.noise.added)
        return Law() if message.exact else None

    @property
    def kept(self) -> Literal["chosen", "largest"]:
        """By which rule it leaves entries out, if it does: by itself, or the smallest ones."""
        return "chosen"

    def informed(self) -> dict[str, Any]:
        """What attackers who know it do about it: settings, of which each attack takes those that
        it has, and grants by the names of an observation's fields: `noise_variance`, or `law` alone
        where nothing else would do. Empty where knowing it is of no use.
        """
        return {}

    def state_dict(self) -> Tensors:
        """What the defense remembers between calls. Private to the client: it depends on its
        data.
        """
        return {}

    def load_state_dict(self, state: Tensors) -> None:
        """Restore what `state_dict` returned."""
        if state:
            raise ValueError(f"{self.name} keeps no state, but got {sorted(state)[:3]}.")

    def settings(self) -> dict[str, Any]:
        """The settings that differ from unset, for cards and logs."""
        named = ((f.name, getattr(self, f.name)) for f in fields(self))  # type: ignore[arg-type]
        return {name: value for name, value in named if value is not None}
