"""The input and output of attacks: `Observation`, `Attack`, `Reconstruction`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..defenses.mechanism import Mechanism
from ..gradient_map import GradientMap
from ..gradient_map.domain import Domain, domain_of_shape, special_frame
from ..gradient_map.local_training.optimizers import Optimizer
from ..gradient_map.replay import modes_kept
from ..gradient_map.types import LossFunction
from ..randomness import Stream, torch_generator
from .local_training import LocalTraining, with_weights


@dataclass(frozen=True)
class Observation:
    """An observation of all that an attack may use: model, shared gradient, shape and grants.

    Nothing here comes from the private batch unless the caller puts it in. Labels, mask and noise
    variance are grants: leave out what the server of your threat model does not know.

    Args:
        model: The model at which the gradient was taken, in the mode in which the client ran it.
        gradient: `{name: tensor}`, what was shared: for some or all trainable parameters.
        input_shape: `(B, T)` of token ids or `(B, C, H, W)` of pixels.
        labels: The labels `(B,)`, if the server knows them.
        attention_mask: The mask `(B, T)`, if the server knows the lengths. `None` counts every
            position as a token.
        tokenizer: The model's tokenizer, which is public. It says which tokens are special, and
            turns ids into text.
        special_tokens: Whether clients' texts have the tokenizer's special tokens around them. That
            is public, like how batches are made; rows that are packed or cut to length have none.
        noise_variance: The variance of the defense's Gaussian noise, one for all or `{name:
            tensor}`, if the server knows it.
        mechanism: How messages come from gradients, if the server knows the defense: what
            `Defense.mechanism(message)` states.
        image_mean: The mean per channel that is subtracted from pixels in [0, 1]. It is public, as
            part of the image processor.
        image_std: The deviation per channel that pixels are divided by afterwards.
        local: How the client trained for several steps before it sent; `from_update` sets it.

    Raises:
        ValueError: If a name or a shape is not the model's, nothing but zeros was shared, labels
            are out of range, or a variance is missing.
        FloatingPointError: If a gradient holds NaN or infinity.

    Example:
        >>> observation = Observation(
        ...     model=model,
        ...     gradient=shared,
        ...     input_shape=batch["input_ids"].shape,
        ...     labels=batch["labels"],
        ...     tokenizer=tokenizer,
        ... )
        >>> observation.domain.name, observation.batch_size
        ('text', 2)
    """

    model: nn.Module
    gradient: Mapping[str, Tensor]
    input_shape: tuple[int, ...]
    labels: Tensor | None = None
    attention_mask: Tensor | None = None
    tokenizer: Any = None
    special_tokens: bool = True
    noise_variance: float | Mapping[str, Tensor] | None = None
    mechanism: Mechanism | None = None
    image_mean: Sequence[float] | None = None
    image_std: Sequence[float] | None = None
    local: LocalTraining | None = None

    @classmethod
    def from_update(
        cls,
        model: nn.Module,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        *,
        input_shape: tuple[int, ...],
        learning_rate: float | Sequence[float],
        steps: int = 1,
        batch_size: int | None = None,
        optimizer: str | Optimizer = "sgd",
        optimizer_kwargs: Mapping[str, Any] | None = None,
        **grants: Any,
    ) -> Observation:
        """Return the observation of a server that sent weights, and got trained weights back.

        Its `gradient` is the mean gradient over the local steps, as it follows from the change of
        the weights. So every attack on gradients works on it. For AdamW it is the mean of its
        normalized directions. `gradient_map` goes through all the steps, so that gradient matching
        does too.

        Args:
            model: The model as the client ran it; it is copied if its weights are not those of
                `before`.
            before: The weights that were sent, by name, as `state_dict()` has them.
            after: The weights that came back; what is missing or did not change counts as withheld.
            input_shape: The shape of all the client's samples.
            learning_rate: The rate of the local steps, one for all or one each.
            steps: K, the number of steps over all epochs.
            batch_size: Samples a step, if epochs do not shuffle them; see `LocalTraining`.
            optimizer: The optimizer of the local steps, as for `UpdateMap`.
            optimizer_kwargs: The settings of the optimizer, as for `UpdateMap`.
            **grants: Fields of `Observation`; noise and mechanism are those of the *update*.

        Raises:
            ValueError: If names or shapes are not the model's, or nothing changed.

        Example:
            >>> before = {name: p.detach().clone() for name, p in model.named_parameters()}
            >>> after = {name: before[name] - 0.1 * shared[name] for name in shared}
            >>> observation = Observation.from_update(
            ...     model, before, after, input_shape=(2, 8), learning_rate=0.1
            ... )
            >>> mean = observation.gradient["classifier.bias"]
            >>> bool(torch.allclose(mean, shared["classifier.bias"], atol=1e-6))
            True
        """
        local = LocalTraining.from_settings(
            learning_rate, steps, batch_size, optimizer, optimizer_kwargs
        )
        return cls(
            with_weights(model, before), local.mean_gradient_of(model, before, after),
            tuple(input_shape), local=local, **local.scale_grants(grants),
        )  # fmt: skip

    def __post_init__(self) -> None:
        parameters = dict(self.model.named_parameters())
        for name, tensor in self.gradient.items():
            if name not in parameters:
                raise ValueError(
                    f"The gradient names {name!r}, which is no parameter of "
                    f"{type(self.model).__name__}."
                )
            if tensor.shape != parameters[name].shape:
                raise ValueError(
                    f"The gradient of {name!r} has shape {tuple(tensor.shape)}, the parameter "
                    f"{tuple(parameters[name].shape)}."
                )
            if not torch.isfinite(tensor).all():
                raise FloatingPointError(
                    f"The gradient of {name!r} is not finite: there is nothing to match."
                )
        if not any(tensor.any() for tensor in self.gradient.values()):
            raise ValueError(
                "Every entry of the shared gradient is zero: it says nothing about the batch."
            )
        if len(self.input_shape) not in (2, 4) or min(self.input_shape) < 1:
            raise ValueError(
                "input_shape must be (B, T) for token ids or (B, C, H, W) for pixels, but is "
                f"{self.input_shape}."
            )
        if self.attention_mask is not None and tuple(self.attention_mask.shape) != tuple(
            self.input_shape
        ):
            raise ValueError(
                f"attention_mask has shape {tuple(self.attention_mask.shape)}, the input "
                f"{tuple(self.input_shape)}."
            )
        if self.labels is not None:
            self._check_labels(self.labels)
        self._check_variances()
        if (self.image_mean is None) != (self.image_std is None):
            raise ValueError("Give image_mean and image_std together, or neither.")
        gradient = {name: tensor.detach() for name, tensor in self.gradient.items()}
        object.__setattr__(self, "gradient", gradient)

    @property
    def domain(self) -> Domain:
        """The domain that the private input was made of: text or image."""
        return domain_of_shape(self.input_shape)

    @property
    def batch_size(self) -> int:
        """The number B of samples behind the gradient."""
        return self.input_shape[0]

    @property
    def device(self) -> torch.device:
        """The device of the shared gradient."""
        return next(iter(self.gradient.values())).device

    @property
    def tokens(self) -> Tensor:
        """The places where the attack looks for a token, `(B, T)`; all unless the mask is known."""
        if self.attention_mask is None:
            return torch.ones(self.input_shape, dtype=torch.bool, device=self.device)
        return self.attention_mask.bool().to(self.device)

    @property
    def frame(self) -> tuple[list[int], list[int]]:
        """The ids of the special tokens before every text, and of those after it."""
        framed = self.tokenizer is not None and self.special_tokens
        return special_frame(self.tokenizer) if framed else ([], [])

    def known_ids(self) -> Tensor:
        """Return the ids of the special tokens around every text, `(B, T)`; -1 elsewhere.

        Where a tokenizer puts [CLS], [SEP] and padding is public. It is read off the encoding of a
        single word.
        """
        ids = torch.full(self.input_shape, -1, dtype=torch.long, device=self.device)
        if self.tokenizer is None:
            return ids
        prefix_ids, suffix_ids = self.frame
        for row, present in zip(ids, self.tokens, strict=True):
            positions = present.nonzero().flatten()
            padding = self.tokenizer.pad_token_id
            row[~present] = -1 if padding is None else padding
            if len(positions) > len(prefix_ids) + len(suffix_ids):
                row[positions[: len(prefix_ids)]] = torch.tensor(
                    prefix_ids, dtype=torch.long, device=self.device
                )
                row[positions[len(positions) - len(suffix_ids) :]] = torch.tensor(
                    suffix_ids, dtype=torch.long, device=self.device
                )
        return ids

    def placeholder(self) -> dict[str, Tensor]:
        """Return a batch of the right shapes that holds nothing private.

        It serves to run the model on candidates of the attacker.
        """
        return _PLACEHOLDERS[self.domain.name](self)

    def gradient_map(self, labels: Tensor, loss_fn: LossFunction | None = None) -> GradientMap:
        """Return the map x ↦ g(x) that the attacker can evaluate at its own candidates.

        Args:
            labels: Class ids `(B,)`, or what `loss_fn` takes as `labels`.
            loss_fn: The loss, as `GradientMap` takes it.
        """
        batch = self.placeholder() | {"labels": labels}
        if self.local is not None:
            return self.local.gradient_map(self.model, batch, loss_fn)
        return GradientMap(self.model, batch, loss_fn=loss_fn)

    def _check_variances(self) -> None:
        for grant, variances in (
            ("noise_variance", self.noise_variance),
            ("mechanism", None if self.mechanism is None else self.mechanism.variance),
        ):
            if not isinstance(variances, Mapping):
                continue
            if missing := self.gradient.keys() - variances.keys():
                raise ValueError(
                    f"{grant} has no variance for {min(missing)!r}, which was shared. Give that of "
                    "every shared parameter, 0 where no noise was added."
                )

    def _check_labels(self, labels: Tensor) -> None:
        classes = getattr(getattr(self.model, "config", None), "num_labels", None)
        if len(labels) != self.batch_size:
            raise ValueError(f"There are {len(labels)} labels for {self.batch_size} samples.")
        is_class = labels.dim() == 1 and not torch.is_floating_point(labels)
        if is_class and classes is not None and (labels.min() < 0 or labels.max() >= classes):
            raise ValueError(
                f"Labels must be class ids from 0 to {classes - 1}, but are {labels.tolist()}."
            )


def _placeholder_ids(observation: Observation) -> dict[str, Tensor]:
    ids = observation.known_ids()
    ids = torch.where(ids >= 0, ids, ordinary_id(observation.model, observation.tokenizer))
    # Without the mask every position counts as a token. Models that derive a mask from padding ids
    # need one.
    return {"input_ids": ids, "attention_mask": observation.tokens.long()}


def _placeholder_pixels(observation: Observation) -> dict[str, Tensor]:
    dtype = next(p.dtype for p in observation.model.parameters() if torch.is_floating_point(p))
    zeros = torch.zeros(observation.input_shape, dtype=dtype, device=observation.device)
    return {"pixel_values": zeros}


_PLACEHOLDERS = {"text": _placeholder_ids, "image": _placeholder_pixels}


def ordinary_id(model: nn.Module, tokenizer: Any) -> int:
    """Return a token id that is not special.

    Some models derive masks and positions from the padding id.

    Example:
        >>> ordinary_id(model, tokenizer) in tokenizer.all_special_ids
        False
    """
    special = set(tokenizer.all_special_ids) if tokenizer is not None else set()
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    size = getattr(getattr(model, "config", None), "vocab_size", 0) or len(tokenizer or ())
    return next((index for index in range(size) if index not in special and index != padding), 0)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Put all modules but batch normalization into eval mode, inside the context.

    Batch normalization stays as the client ran it. The attacker cannot know dropout's draws.

    Example:
        >>> model = model.train()
        >>> with without_dropout(model):
        ...     model.training
        False
        >>> model.training
        True
    """
    with modes_kept(model) as modules:
        for module in modules:
            if not isinstance(module, nn.modules.batchnorm._NormBase):
                module.training = False
        yield


class Clock:
    """The time that an attack may take; when it is over, the attack stops with the best so far.

    Args:
        seconds: The time; `None` for no limit.

    Attributes:
        has_stopped: Whether an attack was told that time is over, and so did not finish.

    Raises:
        ValueError: If the time is below 0.

    Example:
        >>> Clock(0.0).must_stop(), Clock(None).must_stop()
        (True, False)
    """

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None and not seconds >= 0:
            raise ValueError(f"seconds must be at least 0, but is {seconds}.")
        self.seconds, self._started = seconds, time.perf_counter()
        self.has_stopped = False

    @property
    def elapsed(self) -> float:
        """The seconds since the attack began."""
        return time.perf_counter() - self._started

    def must_stop(self) -> bool:
        """Return whether an attack has to stop, and note it in `has_stopped`.

        Ask only where there is more to do.
        """
        is_over = self.seconds is not None and self.elapsed >= self.seconds
        self.has_stopped |= is_over
        return is_over


ENDLESS = Clock(None)
"""A clock without a limit."""


@dataclass
class Reconstruction:
    """A reconstruction: what an attack recovered from one observation.

    Args:
        input: The continuous input that it found, `(B, T, H)` or `(B, C, H, W)`; `None` if it finds
            none. Images lie within the range of pixels.
        token_ids: For texts, one list of ids a sample, special tokens included where their place is
            known. -1 marks a position for which nothing was found.
        text: The texts as strings without special tokens, if the observation has a tokenizer.
        labels: The labels `(B,)`, those of the observation, or as recovered; `None` if the attack
            neither needs nor finds any.
        objective: The value of what the attack minimizes at what it returns, before pixels were
            clipped; lower is a better match.
        seconds: The time taken.
        history: The objective on the way, if the attack iterates.
        undecided: A sentence on what nothing in the gradient decided, such as an order. Empty if
            there is no such thing.
        complete: Whether the attack finished. One that its `seconds` stopped returns the best so
            far.

    Example:
        >>> Reconstruction(token_ids=[[101, 7592, 102]], text=["hello"]).text
        ['hello']
    """

    input: Tensor | None = None
    token_ids: list[list[int]] | None = None
    text: list[str] | None = None
    labels: Tensor | None = None
    objective: float = float("nan")
    seconds: float = float("nan")
    history: list[float] = field(default_factory=list)
    undecided: str = ""
    complete: bool = True


class Attack:
    """A base of all attacks; a subclass is a dataclass of its settings with a `reconstruct` method.

    An attack reads the observation and nothing else, and leaves the model as it found it.
    `hf_gradguard.testing.check_attack` checks this and the rest of the contract.

    Attributes:
        name: The name of the attack in the registry.
        domains: The domains that it works on: `"text"`, `"image"` or both.
        informed_by: Fields of an observation that it uses if the server knows the defense:
            `"noise_variance"`, `"mechanism"`.

    Example:
        >>> @dataclass
        ... class FirstWord(Attack):
        ...     name = "first_word"
        ...     domains = ("text",)
        ...     token: int = 7
        ...
        ...     def reconstruct(self, observation, generator):
        ...         rows, columns = observation.input_shape
        ...         return Reconstruction(token_ids=[[self.token] * columns] * rows)
        >>> len(FirstWord()(observation).token_ids)
        2
        >>> FirstWord()(image_observation)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: first_word is for text, but the input is pixels...
    """

    name: ClassVar[str]
    domains: ClassVar[tuple[str, ...]] = ("text", "image")
    informed_by: ClassVar[frozenset[str]] = frozenset()

    def __call__(
        self, observation: Observation, generator: Stream | torch.Generator | None = None
    ) -> Reconstruction:
        """Reconstruct the batch behind an observation.

        Args:
            observation: The observation of the server.
            generator: The source of all randomness, on the gradient's device. Default: a new one.

        Raises:
            ValueError: If the attack cannot work on what was seen; the message has the reason.
            TypeError: If the attack breaks its contract and returns something else than a
                reconstruction of this many samples.
        """
        self.check_domain(observation)
        torch_rng = torch_generator(generator, observation.device)
        reconstruction = self.reconstruct(observation, torch_rng)
        _check_returned(self.name, reconstruction, observation.batch_size)
        return reconstruction

    def check_domain(self, observation: Observation) -> None:
        """Refuse an observation of a domain that the attack was not made for.

        Raises:
            ValueError: If the domain is another; the message names an attack to use instead.
        """
        if observation.domain.name not in self.domains:
            content = observation.domain.content
            raise ValueError(
                f"{self.name} is for {' and '.join(self.domains)}, but the input is {content}. "
                f"For {content} take {_SUBSTITUTES[observation.domain.name]}."
            )

    def reconstruct(self, observation: Observation, generator: torch.Generator) -> Reconstruction:
        """Reconstruct the batch; subclasses implement it."""
        raise NotImplementedError


def as_text(token_ids: list[list[int]], tokenizer: Any) -> list[str] | None:
    """Return ids as strings, or `None` without a tokenizer.

    Special tokens and positions where nothing was found are left out.

    Example:
        >>> as_text([[-1, *tokenizer("a fine film").input_ids]], tokenizer)
        ['a fine film']
        >>> as_text([[7]], None) is None
        True
    """
    if tokenizer is None:
        return None
    recovered = ([index for index in ids if index >= 0] for ids in token_ids)
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in recovered]


def _check_returned(name: str, returned: Any, batch_size: int) -> None:
    if not isinstance(returned, Reconstruction):
        raise TypeError(f"{name} returned {type(returned).__name__}, and not a Reconstruction.")
    for field_name in ("input", "token_ids", "text", "labels"):
        value = getattr(returned, field_name)
        if value is not None and len(value) != batch_size:
            raise TypeError(
                f"{name} returned {field_name} of {len(value)} samples, but the batch has "
                f"{batch_size}."
            )


_SUBSTITUTES = {"text": "tag", "image": "inverting_gradients"}
