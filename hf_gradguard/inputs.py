"""What is private in a batch, and which parameters would give it away by themselves.

The library asks how a shared gradient depends on a client's *continuous input*: the pixels of an image, or the token
embeddings of a text. Token embeddings are reached through a forward hook on the embedding's output, so that encoders,
decoders, sequence-to-sequence and PEFT-wrapped models are all called in their ordinary way, with token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

logger = logging.get_logger(__name__)

Batch = Mapping[str, Any]
LossFunction = Callable[[nn.Module, dict[str, Any]], Tensor]


@dataclass(frozen=True)
class ContinuousInput:
    """Where a model takes in what is private.

    Args:
        key: The entry of the batch: `"pixel_values"` or `"input_ids"`.
        embedding: For token ids, the module whose output, of shape `(B, T, H)`, is the input; `None` for pixels.
    """

    key: str
    embedding: nn.Module | None = None

    def evaluate(
        self, loss_fn: LossFunction, model: nn.Module, batch: Batch, value: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the model with `value` in place of its continuous input.

        Args:
            loss_fn: `(model, batch) -> loss`, a scalar.
            model: The model to run, in whatever mode it is in.
            batch: What a collator returns. Its token ids stay in use: they give shapes, masks and the embedding rows.
            value: The input to run with; `None` takes the batch's own, as a new leaf.

        Returns:
            The input as it entered the graph, and the loss.
        """
        if self.embedding is None:
            x = _leaf(batch[self.key]) if value is None else value
            return x, loss_fn(model, {**batch, self.key: x})

        seen: list[Tensor] = []

        def replace(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
            x = _leaf(output) if value is None else value
            seen.append(x)
            # The value is x. The graph keeps `output`, so the embedding matrix still gets its gradient if it is shared.
            return output + (x - output.detach())

        handle = self.embedding.register_forward_hook(replace)
        try:
            loss = loss_fn(model, dict(batch))
        finally:
            handle.remove()
        if len(seen) != 1:
            raise ValueError(
                f"The input embedding {type(self.embedding).__name__} of {type(model).__name__} ran {len(seen)} times in "
                "one forward pass, where exactly one is needed to say what the continuous input is. Make "
                "`get_input_embeddings()` (for an encoder-decoder: of `get_encoder()`) return the module that embeds "
                "`input_ids`."
            )
        return seen[0], loss


def find_input(model: nn.Module, batch: Batch) -> ContinuousInput:
    """The continuous input of `model` on `batch`.

    Raises:
        ValueError: If the batch holds no token ids or pixels, holds both, or the model has no input embedding.
    """
    tokens, pixels = "input_ids" in batch, "pixel_values" in batch
    if tokens and pixels:
        raise ValueError(
            "The batch holds both `input_ids` and `pixel_values`. Protecting one of them would leave the other open, so "
            "multimodal batches are not supported. Train the text and the vision part separately."
        )
    if pixels:
        if not torch.is_floating_point(batch["pixel_values"]):
            raise ValueError(
                f"`pixel_values` are {batch['pixel_values'].dtype}: there is no gradient with respect to integers. Convert "
                "them to floating point in the collator, as HF image processors do."
            )
        return ContinuousInput("pixel_values")
    if tokens:
        return ContinuousInput("input_ids", input_embedding(model))
    raise ValueError(
        f"The batch holds {sorted(batch)}: neither `input_ids` nor `pixel_values`, so there is no continuous input to "
        "protect. Return one of them from the collator (precomputed `inputs_embeds` are not supported: pass the ids)."
    )


def shared_parameters(model: nn.Module, share_input_embeddings: bool = False) -> dict[str, nn.Parameter]:
    """The trainable parameters whose gradient a client shares, by name, in the model's own order.

    Input embeddings are left out unless `share_input_embeddings`: their gradient is non-zero on exactly the rows of the
    batch's tokens, so sharing it gives the words away whatever else is done. An output head tied to them is the same
    tensor, and is withheld with them. Says so once.

    Raises:
        ValueError: If nothing is left to share.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    withheld = {} if share_input_embeddings else withheld_parameters(model)
    shared = {name: p for name, p in trainable.items() if name not in withheld}
    if not shared:
        raise ValueError(
            "There is no gradient to share: every trainable parameter is an input embedding, and those are withheld."
            if trainable
            else "There is no gradient to share: every parameter of the model is frozen (`requires_grad=False`)."
        )
    if withheld and _is_first_rank():
        names = sorted({alias for aliases in withheld.values() for alias in aliases})
        tied = " The output head is the same tensor, so it is not trained either." if len(names) > len(withheld) else ""
        logger.warning_once(
            f"Withheld, neither shared nor trained: {', '.join(names)}. Its gradient is non-zero on exactly the batch's "
            f"tokens.{tied} Set share_input_embeddings=True to share it all the same."
        )
    return shared


def withheld_parameters(model: nn.Module) -> dict[str, list[str]]:
    """Trainable parameters of the token embeddings: each name with all the names the same tensor goes by."""
    tensors = {id(p) for module in _token_embeddings(model) for p in module.parameters()}
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


def input_embedding(model: nn.Module) -> nn.Module:
    """The module that embeds a model's `input_ids`, in an encoder-decoder that of the encoder.

    Raises:
        ValueError: If the model names none.
    """
    # An encoder-decoder embeds its source in a module of the encoder's own: a hook on the shared one never fires.
    config = getattr(model, "config", None)
    owner = model.get_encoder() if getattr(config, "is_encoder_decoder", False) else model  # type: ignore[operator]
    embedding = _embedding_of(owner)
    if embedding is None:
        raise ValueError(
            f"{type(model).__name__} names no input embedding, so `input_ids` give no continuous input. Implement "
            "`get_input_embeddings()` to return the module that embeds them."
        )
    return embedding


def _token_embeddings(model: nn.Module) -> list[nn.Module]:
    """Every module that embeds token ids: the model's, and an encoder-decoder's two."""
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        return []  # vision models call their patch projection an input embedding; it is shared like any other weight
    owners = [model]
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        owners += [model.get_encoder(), model.get_decoder()]  # type: ignore[operator]
    return [module for module in map(_embedding_of, owners) if module is not None]


def _embedding_of(owner: nn.Module) -> nn.Module | None:
    try:
        embedding = owner.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    return embedding if isinstance(embedding, nn.Module) else None
