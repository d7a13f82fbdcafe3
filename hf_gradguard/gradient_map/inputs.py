"""What is private in a batch, and which parameters would give it away by themselves.

The library asks how a shared gradient depends on a client's *continuous input*: the pixels of an
image, or the token embeddings of a text. Token embeddings are reached through a forward hook on the
embedding's output, so that encoders, decoders, sequence-to-sequence and PEFT-wrapped models are all
called in their ordinary way, with token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .domain import Domain, domain_of_batch, domain_of_model

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

        seen: list[Tensor] = []

        def replace(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
            x = _leaf(output) if value is None else value
            seen.append(x)
            # The value is x. The graph keeps `output`, so the embedding matrix still gets its
            # gradient if it is shared.
            return output + (x - output.detach())

        handle = self.embedding.register_forward_hook(replace)
        try:
            loss = loss_fn(model, dict(batch))
        finally:
            handle.remove()
        if len(seen) != 1:
            raise ValueError(
                f"The input embedding {type(self.embedding).__name__} of {type(model).__name__} "
                f"ran {len(seen)} times in one forward pass, where exactly one is needed to say "
                "what the continuous input is. Make `get_input_embeddings()` (for an "
                "encoder-decoder: of `get_encoder()`) return the module that embeds `input_ids`."
            )
        return seen[0], loss


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


def find_input(model: nn.Module, batch: Batch) -> ContinuousInput:
    """The continuous input of `model` on `batch`.

    Raises:
        ValueError: If the batch holds no token ids or pixels, holds both, or the model has no input
            embedding.
    """
    domain = domain_of_batch(batch)
    return ContinuousInput(domain, domain.embedding(model))


def shared_parameters(
    model: nn.Module, share_input_embeddings: bool = False
) -> dict[str, nn.Parameter]:
    """The trainable parameters whose gradient a client shares, by name, in the model's own order.

    Input embeddings are left out unless `share_input_embeddings`: their gradient is non-zero on
    exactly the rows of the batch's tokens, so sharing it gives the words away whatever else is
    done. An output head tied to them is the same tensor, and is withheld with them. Says so once.

    Raises:
        ValueError: If nothing is left to share.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    withheld = {} if share_input_embeddings else withheld_parameters(model)
    shared = {name: p for name, p in trainable.items() if name not in withheld}
    if not shared:
        raise ValueError(
            "There is no gradient to share: every trainable parameter is an input embedding, and "
            "those are withheld."
            if trainable
            else "There is no gradient to share: every parameter of the model is frozen (`requires_grad=False`)."
        )
    if withheld and _is_first_rank():
        names = sorted({alias for aliases in withheld.values() for alias in aliases})
        tied = (
            " The output head is the same tensor, so it is not trained either."
            if len(names) > len(withheld)
            else ""
        )
        logger.warning_once(
            f"Withheld, neither shared nor trained: {', '.join(names)}. Its gradient is non-zero "
            f"on exactly the batch's tokens.{tied} Set share_input_embeddings=True to share it all "
            "the same."
        )
    return shared


def withheld_parameters(model: nn.Module) -> dict[str, list[str]]:
    """Trainable parameters of the token embeddings: each name with all the names the same tensor
    goes by.
    """
    tensors = {
        id(p)
        for module in domain_of_model(model).token_embeddings(model)
        for p in module.parameters()
    }
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in tensors and parameter.requires_grad:
            aliases.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in aliases.values()}


def _is_first_rank() -> bool:
    return (
        not (torch.distributed.is_available() and torch.distributed.is_initialized())
        or not torch.distributed.get_rank()
    )


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()
