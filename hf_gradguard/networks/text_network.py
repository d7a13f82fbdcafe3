"""The evaluation network of texts."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from ..gradient_map.domain import embed
from .configuration import (
    EvaluationNetworkBase,
    EvaluationNetworkOutput,
    TextEvaluationNetworkConfig,
)
from .noising import embedding_weight

_RATIO_WEIGHT = 10.0
"""The weight of the squared error of a text's ratio, beside the cross-entropy of its tokens."""


class TextEvaluationNetwork(EvaluationNetworkBase):
    """A network that says how much of a text is noise, from its token embeddings.

    A few residual convolutions over the tokens give every token a probability of having been drawn
    at random from the vocabulary, given its neighbors and the mean of the text. The noise ratio is
    the mean of these over the ordinary tokens. Special tokens ([CLS], [SEP], padding) are known by
    their embeddings, kept in the network: they are neither read nor counted, whether the attention
    mask covers them or not.

    Example:
        >>> embedding = model.get_input_embeddings()
        >>> config = TextEvaluationNetworkConfig(embedding_size=embedding.embedding_dim, width=16)
        >>> x = embedding(batch["input_ids"])
        >>> TextEvaluationNetwork(config).noise_ratio(x, batch["attention_mask"]).shape
        torch.Size([2])
    """

    config_class = TextEvaluationNetworkConfig
    config: TextEvaluationNetworkConfig
    base_model_prefix = "network"
    main_input_name = "inputs_embeds"

    embedding_mean: Tensor
    embedding_std: Tensor
    special_embeddings: Tensor

    def __init__(self, config: TextEvaluationNetworkConfig) -> None:
        super().__init__(config)
        size, width = config.embedding_size, config.width
        # Embeddings of different models differ in scale by orders: bring them to unit variance
        # before anything else.
        self.register_buffer("embedding_mean", torch.zeros(size))
        self.register_buffer("embedding_std", torch.ones(size))
        self.register_buffer("special_embeddings", torch.zeros(len(config.special_token_ids), size))
        self.norm = nn.LayerNorm(size)
        self.project = nn.Linear(size, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(config.num_layers))
        self.convolutions = nn.ModuleList(
            nn.Conv1d(width, width, config.kernel_size, padding=config.kernel_size // 2)
            for _ in range(config.num_layers)
        )
        self.contexts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(config.num_layers)
        )
        self.head = nn.Linear(width, 1)
        self.post_init()

    def noise_ratio(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return how much of each text is random words.

        Args:
            x: Token embeddings `(B, T, H)`, as the model's input-embedding module returns them (no
                positions added).
            attention_mask: `(B, T)`, 1 at real tokens. What it leaves out has no influence. `None`:
                all are real.

        Returns:
            `(B,)` in [0, 1]. A text without ordinary tokens, all padding or nothing but special
            tokens, holds no words that could be noise: its ratio is 0, and so is its gradient.

        Raises:
            ValueError: If the embeddings' length is not the network's, or the mask has another
                shape.
        """
        logits, counted = self._token_logits(x, attention_mask)
        return _masked_mean(torch.sigmoid(logits), counted)

    def forward(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool = True,
        **_: Any,
    ) -> EvaluationNetworkOutput | tuple[Tensor, ...]:
        """Return the `noise_ratio`, and the loss if there are labels.

        Args:
            inputs_embeds: Token embeddings, `(B, T, H)`.
            attention_mask: `(B, T)`, 1 at real tokens; `None` if all are real.
            labels: How much of each token is noise, `(B, T)`, or of each text, `(B,)`.
            return_dict: Whether to return an object rather than a tuple.
        """
        logits, counted = self._token_logits(inputs_embeds, attention_mask)
        ratio = _masked_mean(torch.sigmoid(logits), counted)
        loss = None
        if labels is not None:
            labels = labels.to(logits.dtype)
            true = labels
            if labels.ndim == 2:
                tokens = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
                loss = (tokens * counted).sum() / counted.sum().clamp(min=1)
                true = _masked_mean(labels, counted)
            # A text's own ratio, beside its tokens': errors that all tokens of a text share are the
            # ones that count.
            error = (ratio - true).square().mean()
            loss = error if loss is None else loss + _RATIO_WEIGHT * error
        output = EvaluationNetworkOutput(loss=loss, noise_ratio=ratio)
        return output if return_dict else output.to_tuple()

    def reads(self, x: Tensor) -> Tensor:
        """Return which embeddings `(B, T, H)` are read, `(B, T)`: all but special tokens'."""
        return self._ordinary(x.detach())

    def check_embedding(self, weight: Tensor) -> None:
        """Refuse an embedding matrix that the network was not trained on.

        Args:
            weight: The matrix, `(V, H)`.

        Raises:
            ValueError: If it is another one.
        """
        if embedding_fingerprint(weight) == self.config.embedding_fingerprint:
            return
        made_for = self.config.base_model or "another model"
        raise ValueError(
            f"This evaluation network was trained on the embedding matrix of {made_for} "
            f"(fingerprint {self.config.embedding_fingerprint[:12]}), which is not the model's, "
            f"{tuple(weight.shape)} in {weight.dtype} (fingerprint "
            f"{embedding_fingerprint(weight)[:12]}). The same word has other coordinates there, so "
            "what it says would mean nothing. Fine-tuning the matrix, adding tokens or loading it "
            "in half precision also changes it. Train a network on this one: "
            "`cached_text_network(model.get_input_embeddings(), tokenizer, texts)` or `gradguard "
            "evalnet train --model ... --dataset ...`."
        )

    @torch.no_grad()
    def set_embedding_statistics(self, weight: Tensor) -> None:
        """Store mean, scale and special tokens' rows of all embeddings, once before training.

        Args:
            weight: The embeddings of all tokens, `(V, H)`.
        """
        weight = weight.float()
        self.embedding_mean.copy_(weight.mean(0))
        self.embedding_std.copy_(weight.std(0).clamp(min=float(weight.std()) * 1e-3 + 1e-12))
        self.special_embeddings.copy_(weight[list(self.config.special_token_ids)])

    def _token_logits(self, x: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return `(B, T)` logits of a token being noise, and which tokens count, as 0 or 1."""
        if x.ndim != 3 or x.shape[-1] != self.config.embedding_size:
            raise ValueError(
                "This evaluation network judges embeddings of shape (B, T, "
                f"{self.config.embedding_size}), but was given {tuple(x.shape)}. It belongs to "
                f"{self.config.base_model or 'another model'}: train one on your model's "
                "embeddings with `gradguard evalnet train --model ... --dataset ...`."
            )
        if attention_mask is not None and attention_mask.shape != x.shape[:2]:
            raise ValueError(
                f"attention_mask must be {tuple(x.shape[:2])}, one entry per token, but is "
                f"{tuple(attention_mask.shape)}. Pass the tokenizer's mask, not a prepared 4-D one."
            )
        x = x.to(self.dtype)
        counted = self._ordinary(x.detach()).to(x.dtype)
        if attention_mask is not None:
            counted = counted * attention_mask.bool().to(x.dtype)
        # What does not count is set to zero before every convolution, as if the text ended there.
        # `where`, not a product: padding may hold anything, and 0 times infinity is not 0.
        keep = counted.bool().unsqueeze(-1)
        x = x.where(keep, self.embedding_mean.to(x.dtype))
        hidden = self.project(self.norm((x - self.embedding_mean) / self.embedding_std))
        for norm, convolution, context in zip(
            self.norms, self.convolutions, self.contexts, strict=True
        ):
            tokens = (norm(hidden) * counted.unsqueeze(-1)).transpose(1, 2)
            mixed = convolution(tokens).transpose(1, 2)
            hidden = hidden + F.gelu(mixed)
            # A rare word is likely noise in a text of noise, and likely a word in a text of words.
            hidden = hidden + context(_masked_mean(hidden, counted)).unsqueeze(1)
        return self.head(F.gelu(hidden)).squeeze(-1), counted

    def _ordinary(self, x: Tensor) -> Tensor:
        """Return whether each embedding is none of the special tokens', `(B, T)`.

        It is compared within 1 %: the copies are kept in half precision, and no two tokens of a
        trained model are that close.
        """
        special = self.special_embeddings.float()
        if special.shape[0] == 0:
            return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        # Not through a matrix product: on accelerators that rounds to fewer digits than 1 % of a
        # distance needs.
        distance = torch.cdist(x.float(), special, compute_mode="donot_use_mm_for_euclid_dist")
        return (distance > 0.01 * special.norm(dim=-1)).all(-1)


def every_embedding(embedding: nn.Module) -> Tensor:
    """Return the embedding of every token, `(V, H)`.

    The module is called, since it may scale its matrix, as Gemma's does.
    """
    weight = embedding_weight(embedding)
    return embed(embedding, torch.arange(len(weight), device=weight.device)).detach()


def embedding_fingerprint(weight: Tensor) -> str:
    """Return the SHA-256 over an embedding matrix's shape and values, as 64 hexadecimal digits.

    The values are hashed as little-endian float32, so the device does not matter, nor whether the
    matrix was saved and loaded again in float32 or wider. A matrix rounded to half precision is
    another matrix with another fingerprint, even when loaded back as float32: load the model in
    float32, or train a network for the rounded one.

    Args:
        weight: The matrix, `(V, H)`, on any device and of any floating-point type.

    Example:
        >>> weight = model.get_input_embeddings().weight
        >>> embedding_fingerprint(weight) == embedding_fingerprint(weight.double())
        True
        >>> embedding_fingerprint(weight) == embedding_fingerprint(weight.half())
        False
    """
    values = weight.detach().to(device="cpu", dtype=torch.float32).contiguous()
    digest = hashlib.sha256(f"{tuple(values.shape)}".encode())
    digest.update(values.numpy().astype("<f4", copy=False).tobytes())
    return digest.hexdigest()


def _masked_mean(values: Tensor, counted: Tensor) -> Tensor:
    """Return the mean over the tokens that count, of `(B, T)` or `(B, T, W)`; 0 if none does."""
    if values.ndim == 3:
        counted = counted.unsqueeze(-1)
    return (values * counted).sum(1) / counted.sum(1).clamp(min=1)


_CONFIG = TextEvaluationNetworkConfig
AutoConfig.register(_CONFIG.model_type, _CONFIG, exist_ok=True)
AutoModel.register(TextEvaluationNetworkConfig, TextEvaluationNetwork, exist_ok=True)
