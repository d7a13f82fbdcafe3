"""Audits of a `GradGuardTrainer` in its current state: what its next messages would give away."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import Trainer

from ..defenses import Defense
from ..gradient_map.domain import IMAGE, TEXT, count_rows
from ..training.clients.batches import CLIENT, ROW, SHARE, SampledRow
from ..training.config import setting
from ..training.mixin import GradGuardMixin
from .cells import code_digest
from .client import Modality, Shared, modality_of
from .message_loop import Setup
from .settings import AuditSettings

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_DECOYS = 100  # candidates among which an attacker has to find the audited rows


def set_up_trainer(
    trainer: Any, samples: int, candidates: Sequence[Any] | None, requested: Mapping[str, Any]
) -> tuple[AuditSettings, Setup, Defense]:
    """Return the settings and the setup for an audit of what a Trainer would share.

    The setup has its model in training mode, batches of its data by its collator, its loss, and its
    first client's defense with what that remembers.

    Args:
        trainer: The Trainer, built and perhaps trained.
        samples: How many rows of its data to attack.
        candidates: What an attacker has beside those. Default: other rows of the data.
        requested: Settings of the audit. Sizes of batches default to the Trainer's.

    Returns:
        The settings, what is audited, and the defense.

    Raises:
        ValueError: If the Trainer protects nothing, runs on several ranks, or its data has no rows
            to be drawn.
    """
    _check(trainer, requested)
    args = trainer.args
    clients = setting(args, "clients_per_process")
    settings = AuditSettings.from_mapping(
        {
            "batch_size": max(1, args.per_device_train_batch_size // clients),
            "accumulation": args.gradient_accumulation_steps,
            "share_input_embeddings": setting(args, "share_input_embeddings"),
            **requested,
        }
    )
    model = trainer.ready_for_step(trainer.model)
    modality = modality_of(model, trainer.processing_class, settings)
    size = settings.batch_size * settings.accumulation
    if samples < 1 or samples % size:
        raise ValueError(
            f"{samples} samples do not fill messages of {size}, which this Trainer shares: "
            f"{settings.batch_size} rows a batch, {settings.accumulation} batches a step. Give a "
            "multiple."
        )
    # In the Trainer's mode and through its collator, as its next steps would take them.
    batches, decoys = _draw(trainer, samples, size, settings.seed)
    listed: list[Any] = [row for batch in [*batches, *decoys] for row in _rows(modality, batch)]
    # An empty list asks for no membership inference; neither is there one of audited rows alone.
    candidates = None if candidates is None else list(candidates)
    infers = (decoys or candidates) if candidates is None else bool(candidates)
    setup = Setup(
        model, modality, batches,
        modality.candidates([*listed, *(candidates or [])]) if infers else None,
        Shared(settings.share_input_embeddings, trainer._withhold,
               functools.partial(trainer._loss, items=None), settings.accumulation),
        identity=[args.label_smoothing_factor, code_digest(type(trainer))],
        assumptions=_assumptions(trainer),
    )  # fmt: skip
    client = trainer._clients[0]
    return settings, setup, client.defense.with_state(client.state)


def _check(trainer: Trainer, requested: Mapping[str, Any]) -> None:
    if not isinstance(trainer, GradGuardMixin):
        raise ValueError(
            f"{type(trainer).__name__} shares its gradients as they are. Audit a "
            "GradGuardTrainer, or a model."
        )
    if trainer.accelerator.num_processes > 1:
        raise ValueError("Audit a Trainer in one process: ranks would each attack their own rows.")
    if not requested.get("lengths_known", True):
        raise ValueError(
            "The collator pads a Trainer's batches to their longest text, so their shape tells its "
            "length: leave lengths_known, or audit the model."
        )
    if requested.get("local_steps"):
        raise ValueError(
            "A Trainer's clients share a gradient each step: leave out local_steps, or audit the "
            "model, with its samples."
        )


def _draw(
    trainer: GradGuardMixin, samples: int, size: int, seed: int
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Return batches to attack, and other rows one by one, collated as in training."""
    loader: DataLoader[Any] = trainer.get_train_dataloader()
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        raise ValueError("Rows of an iterable data set cannot be drawn: audit the model.")
    count = len(dataset)
    if samples > count:
        raise ValueError(f"{samples} samples were asked for, and the data has {count} rows.")
    order = np.random.default_rng(seed).permutation(count).tolist()

    def batch(numbers: list[int]) -> dict[str, Tensor]:
        # Divided data is addressed by row, client and share.
        divided = trainer._rows_of_clients
        keys: list[Any] = [SampledRow(n, 0, 1.0) if divided else n for n in numbers]
        collated = loader.collate_fn([dataset[key] for key in keys])
        tensors = {name: x for name, x in dict(collated).items() if isinstance(x, Tensor)}
        marks, device = (CLIENT, ROW, SHARE), trainer.args.device
        return {name: x.to(device) for name, x in tensors.items() if name not in marks}

    batches = [batch(order[start : start + size]) for start in range(0, samples, size)]
    return batches, [batch([number]) for number in order[samples : samples + _DECOYS]]


def _rows(modality: Modality, batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return each row as an attacker would list it.

    It is without padding, and with labels where they belong to the text.
    """
    count = count_rows(batch)
    if IMAGE.key in batch:
        return [{IMAGE.key: batch[IMAGE.key][index]} for index in range(count)]
    rows = []
    for index in range(count):
        ids, mask = batch[TEXT.key][index], batch.get("attention_mask")
        # Without a mask all texts are of one length.
        attended = (ids == ids) if mask is None else mask[index].bool()
        if modality.labels not in ("text", "token"):
            rows.append({TEXT.key: ids[attended]})
            continue
        labels = batch["labels"][index]
        labels = labels[attended] if labels.shape == ids.shape else labels[labels >= 0]
        mask = attended[attended].long()
        row = {TEXT.key: ids[attended], "labels": labels, "attention_mask": mask}
        rows.append({name: tensor[None] for name, tensor in row.items()})
    return rows


def _assumptions(trainer: GradGuardMixin) -> list[str]:
    sentences = [
        f"This is the Trainer's own next message, at step {trainer.state.global_step}, and the "
        "defense remembers its earlier ones."
    ]
    has_own_loss = type(trainer).compute_loss is not Trainer.compute_loss
    if trainer.label_smoother is not None or trainer.compute_loss_func is not None or has_own_loss:
        sentences.append(
            "The client's loss is the Trainer's; attackers take the model's own, which differs."
        )
    return sentences
