"""What is private in a batch, and which parameters would give it away by themselves.

The library asks how a shared gradient depends on a client's *continuous input*: the pixels of an
image, or the token embeddings of a text. Token embeddings are reached through a forward hook on the
embedding's output, so that encoders, decoders, sequence-to-sequence and PEFT-wrapped models are all
called in their ordinary way, with token ids.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .batch.tables import find_tables, known_tables
from .batch.texts import Slots
from .domain import Domain, Text, domain_of_batch, domain_of_model

logger = logging.get_logger(__name__)

Batch = Mapping[str, Any]
LossFunction = Callable[[nn.Module, dict[str, Any]], Tensor]


@dataclass(frozen=True)
class ContinuousInput:
    """Where a model takes in what is private.

    Args:
        domain: Text or image.
        embedding: For token ids, the module whose output, of shape `(B, T, H)`, is the input;
            `None` for pixels.
    """

    domain: Domain
    embedding: nn.Module | None = None

    def evaluate(
        self, loss_fn: LossFunction, model: nn.Module, batch: Batch, value: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the model with `value` in place of its continuous input.

        Args:
            loss_fn: `(model, batch) -> loss`, a scalar.
            model: The model to run, in whatever mode it is in.
            batch: What a collator returns. Its token ids stay in use: they give shapes, masks and
                the embedding rows.
            value: The input to run with; `None` takes the batch's own, as a new leaf.

        Returns:
            The input as it entered the graph, and the loss.
        """
        if self.embedding is None:
            x = _leaf(batch[self.domain.key]) if value is None else value
            return x, loss_fn(model, {**batch, self.domain.key: x})

        assert isinstance(self.domain, Text)
        texts = self.domain.texts(batch)
        slots = Slots(list(texts.values()), value, only=len(self.domain.keys) == 1)
        with self.embedding.register_forward_hook(slots, with_kwargs=True):
            loss = loss_fn(model, dict(batch))
        if slots.strangers or slots.found != len(texts):
            raise ValueError(
                f"The input embedding {type(self.embedding).__name__} of {type(model).__name__} "
                f"ran {slots.found + slots.strangers} times in one forward pass, on texts that "
                f"differ, where the batch holds {len(texts)} ({', '.join(texts)}), so nothing says "
                "what the continuous input is. Make `get_input_embeddings()` (for an "
                "encoder-decoder: of `get_encoder()`) return the module that embeds them. "
                "gaussian_noise, pruning and quantization need no such input."
            )
        assert slots.x is not None
        return slots.x, loss

    def checked(self, x: Tensor) -> Tensor:
        """The input, as there is one."""
        return x


class NoInput:
    """In the place of a continuous input that nobody asks for."""

    embedding = None

    @property
    def domain(self) -> Domain:
        """There is none."""
        raise ValueError(_NOT_ASKED)

    def evaluate(
        self, loss_fn: LossFunction, model: nn.Module, batch: Batch, value: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the model as it is. What stands for the input is empty."""
        if value is not None:
            raise ValueError(_NOT_ASKED)
        return torch.zeros(0), loss_fn(model, dict(batch))

    def checked(self, x: Tensor) -> Tensor:
        """There is none."""
        raise ValueError(_NOT_ASKED)


_NOT_ASKED = (
    "This GradientMap was made with needs_input=False, so it has no continuous input. A defense "
    "that asks for one has to say so: its facts have needs_input=True unless a class says "
    "otherwise."
)


def model_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The loss that a Hugging Face model returns when the batch holds labels."""
    outputs = model(**batch)
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs[0]
    if loss is None:
        raise ValueError(
            f"{type(model).__name__} returned no loss on a batch of {sorted(batch)}. Add `labels` "
            "to the batch, use a model with a task head, or pass loss_fn."
        )
    return loss


def find_input(model: nn.Module, batch: Batch, needed: bool = True) -> ContinuousInput | NoInput:
    """The continuous input of `model` on `batch`, if it is needed.

    Raises:
        ValueError: If the batch holds no token ids or pixels, holds both, or the model has no input
            embedding.
    """
    if not needed:
        return NoInput()
    domain = domain_of_batch(batch)
    return ContinuousInput(domain, domain.embedding(model))


def shared_parameters(
    model: nn.Module, share_input_embeddings: bool = False, withhold: Sequence[str] = ()
) -> dict[str, nn.Parameter]:
    """The trainable parameters whose gradient a client shares, by name, in the model's own order.

    Tables that the input indexes are left out unless `share_input_embeddings`: their gradient is
    non-zero on exactly the rows that the batch looks up, so sharing it gives the words away
    whatever else is done. They are the model's token embeddings and what `find_tables` found. An
    output head tied to one is the same tensor, and is withheld with it. Says so once.

    Args:
        model: The model.
        share_input_embeddings: Share these tables all the same.
        withhold: Patterns of names (`"*.experts.*"`) that are left out in any case.

    Raises:
        ValueError: If nothing is left to share, or a pattern is of no parameter.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tables = {} if share_input_embeddings else withheld_parameters(model)
    chosen = withheld_by_name(model, withhold)
    shared = {n: p for n, p in trainable.items() if n not in tables and n not in chosen}
    if not shared:
        raise ValueError(
            "There is no gradient to share: every trainable parameter is an input embedding, and "
            "those are withheld."
            if trainable and not chosen
            else "There is no gradient to share: every trainable parameter is withheld."
            if trainable
            else "There is no gradient to share: every parameter of the model is frozen "
            "(`requires_grad=False`)."
        )
    if _is_first_rank():
        ids = _token_embeddings(model)
        _say_withheld(tables, {name for name in tables if id(trainable[name]) in ids})
        if chosen:
            logger.warning_once(f"Withheld as told: {', '.join(chosen)}.")
    return shared


def shared_by_batch(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFunction,
    share_input_embeddings: bool = False,
    withhold: Sequence[str] = (),
) -> dict[str, nn.Parameter]:
    """`shared_parameters`, after a look at which tables the batch indexes."""
    if not share_input_embeddings:
        find_tables(model, batch, loss_fn)
    return shared_parameters(model, share_input_embeddings, withhold)


def withheld_parameters(model: nn.Module) -> dict[str, list[str]]:
    """Trainable parameters of the tables that the input indexes: each name with all the names the
    same tensor goes by.

    They are those of the token embeddings, by name, and those that `find_tables` found. An adapter
    of a table is withheld with it.
    """
    tables = _token_embeddings(model)
    modules = dict(model.named_modules())
    for name in known_tables(model):
        tables.add(id(model.get_parameter(name)))
        owner = name.rpartition(".")[0]
        parts = owner.split(".")
        for length in range(1, len(parts) + 1):
            wrapper = modules[".".join(parts[:length])]
            if hasattr(wrapper, "base_layer"):  # as PEFT calls what an adapter is put around
                tables |= {id(parameter) for parameter in wrapper.parameters()}
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in tables and parameter.requires_grad:
            aliases.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in aliases.values()}


def withheld_by_name(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Trainable parameters that a pattern names.

    Raises:
        ValueError: If a pattern is of none of the model's parameters.
    """
    if not patterns:
        return []
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in patterns:
        if not fnmatch.filter(every, pattern):
            raise ValueError(
                f"withhold={pattern!r} names no parameter of {type(model).__name__}. Its last are: "
                f"{', '.join(every[-4:])}. `*` stands for anything."
            )
    return [name for name in names if any(fnmatch.fnmatchcase(name, one) for one in patterns)]


def _token_embeddings(model: nn.Module) -> set[int]:
    """The parameters of the modules that a model calls its token embeddings, by identity."""
    modules = domain_of_model(model).token_embeddings(model)
    return {id(p) for module in modules for p in module.parameters()}


def _say_withheld(tables: Mapping[str, list[str]], embeddings: set[str]) -> None:
    """Once for the token embeddings, and once for other tables."""
    for which, why in (
        (tables.keys() & embeddings, "Its gradient is non-zero on exactly the batch's tokens."),
        (tables.keys() - embeddings, "The input says which rows of it are looked up, and its "
         "gradient is non-zero on exactly these."),
    ):  # fmt: skip
        names = sorted({alias for name in which for alias in tables[name]})
        tied = (
            " The output head is the same tensor, so it is not trained either."
            if len(names) > len(which)
            else ""
        )
        if names:
            logger.warning_once(
                f"Withheld, neither shared nor trained: {', '.join(names)}. {why}{tied} Set "
                "share_input_embeddings=True to share it all the same."
            )


def _is_first_rank() -> bool:
    return (
        not (torch.distributed.is_available() and torch.distributed.is_initialized())
        or not torch.distributed.get_rank()
    )


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()
