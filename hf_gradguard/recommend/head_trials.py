"""Trials of linear heads by proof, each on the frozen encoder that it names.

Features are made once, and every training takes seconds.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PrinterCallback

from ..audit.cells import Cell, Cells, code_digest, digest
from ..flags import SourceSettings
from ..gradient_map.domain import domain_of_model
from ..heads import PrivateHead, private_head
from ..heads.head import load_encoder
from ..heads.making import MOST_PUBLIC, packaged_sentences
from ..models import label_kind, task_of, without_adapters
from ..training.trainer import GradGuardTrainer
from .evidence import Outcome, Proof
from .intervals import accuracy_over_seeds, mean_over_seeds
from .pace import OutOfTime, Pace
from .trial_settings import TrialSettings
from .trials import Split

_LABEL = "head on {}"
_TRAINED_WITH = "noise_multiplier", "delta", "clip", "directions", "learning_rate"


def why_no_head(model: nn.Module, public: Any, settings: TrialSettings) -> str:
    """Return why no head by proof can be tried with a model, and what to do, or an empty string.

    Args:
        model: The model that is to be trained.
        public: Public samples, if there are any.
        settings: The settings of all trials.
    """
    if not settings.heads:
        return "No linear head by proof was tried (--no_heads)."
    if label_kind(model) != "class":
        task = task_of(model)
        return (
            "No linear head by proof was tried: it is for one class a sample, and this model is "
            f"for {task.name if task else 'another task'}."
        )
    if domain_of_model(model).name == "image" and public is None:
        return (
            "No linear head by proof was tried: for images it needs public ones, which are "
            "nobody's secret (--public FOLDER)."
        )
    return ""


def heads_to_try(
    model: nn.Module, encoders: Sequence[str], source: SourceSettings | None
) -> dict[str, str | nn.Module]:
    """Return the encoders of heads by their names, the model's own encoder first.

    Args:
        model: The model that is to be trained, by whose encoder the first head is.
        encoders: Names of further encoders.
        source: Names of the model and the data.
    """
    base = without_adapters(model)
    loaded = str(getattr(base.config, "name_or_path", "") or "")
    # Adapters' folder names no encoder, but the model below them does.
    name = loaded if base is not model or source is None else source.model
    return {name or "the model": base, **{other: other for other in encoders if other != name}}


class HeadTrials:
    """Trainings of heads by proof on one split, stored as cells.

    Args:
        encoders: Encoders by name, as `heads_to_try` returns them.
        processing_class: The tokenizer or image processor of those that are no names.
        num_labels: The number of classes.
        public: Public samples, or their file or folder.
        split: The split of the data. Samples that choose others' rates are trained on: a head's
            rate is not chosen.
        settings: The settings of all trials. A head is trained on as many samples as the others:
            `steps` messages of `batch_size`, or one pass if there are fewer rows.
        folder: The folder of cells.
        pace: The pace of all trials.

    Attributes:
        encoders: The names of encoders, by the label of their head.
        seconds_per_parameter: How long a model takes to read a sample, by its size; see `observe`.
    """

    def __init__(
        self,
        encoders: Mapping[str, str | nn.Module],
        processing_class: Any,
        num_labels: int,
        public: str | Sequence[Any] | None,
        split: Split,
        settings: TrialSettings,
        folder: Path,
        pace: Pace,
    ) -> None:
        self.encoders = {_LABEL.format(_short(name)): name for name in encoders}
        self._modules = dict(zip(self.encoders, encoders.values(), strict=True))
        self._processing_class, self._num_labels = processing_class, num_labels
        self._public, self._settings = public, settings
        self._cells, self._pace = Cells(folder / "cells"), pace
        size = settings.batch_size
        self._samples = {
            "training": [*split.training, *split.choosing], "judging": split.judging
        }  # fmt: skip
        count = len(self._samples["training"])
        self.rows = min(count, settings.steps * size) // size * size
        self._heads, self._keys = dict[str, PrivateHead](), dict[str, str]()
        self._prepared = dict[tuple[str, str], Any]()
        self._training_seconds = dict[str, float]()
        self.seconds_per_parameter = 0.0

    def observe(self, model: nn.Module, seconds: float, samples: int) -> None:
        """Record how long a model took to read samples, to foretell how long encoders take.

        Args:
            model: The model.
            seconds: How long it took.
            samples: The number of samples.
        """
        self.seconds_per_parameter = seconds / samples / max(1, _size(model))

    def judging(self, label: str, seed: int) -> list[float]:
        """Return the accuracy of each judging sample after a training.

        Args:
            label: The label of the head.
            seed: The seed of the training and of its draw of rows.

        Raises:
            OutOfTime: If there is no time for it.
            ValueError: If the head cannot be trained on these rows.
            OSError: If the encoder cannot be loaded.
        """
        return list(self._trained(label, seed)["judging"])

    def outcome_of(
        self, label: str, accuracies: list[list[float]], plain_accuracies: list[list[float]]
    ) -> Outcome:
        """Return the outcome of a head.

        Args:
            label: The label of the head.
            accuracies: The accuracy of each judging sample, for each training.
            plain_accuracies: The same of the undefended whole model.
        """
        cell = self._trained(label, self._settings.seed)
        proof = Proof(
            cell["noise_multiplier"], cell["epsilon"], cell["delta"], self.encoders[label],
            self.rows,
        )  # fmt: skip
        lost = np.array(plain_accuracies) - np.array(accuracies)
        return Outcome(
            label, cell["learning_rate"], accuracy_over_seeds(accuracies),
            mean_over_seeds(lost, are_fractions=True), None,
            accuracy_by_sample=dict(enumerate(np.mean(accuracies, axis=0).tolist())),
            trainings=np.mean(accuracies, axis=1).tolist(), proof=proof,
        )  # fmt: skip

    def flags_of(self, label: str) -> dict[str, Any]:
        """Return the flags by which `gradguard train` trains this head as it was tried."""
        cell = self._trained(label, self._settings.seed)
        public = {"public": self._public} if isinstance(self._public, str) else {}
        return {
            "head": True, "encoder": self.encoders[label], **public,
            **{name: cell[name] for name in _TRAINED_WITH},
            "per_device_train_batch_size": self._settings.batch_size,
            "max_steps": self.rows // self._settings.batch_size,
        }  # fmt: skip

    def _trained(self, label: str, seed: int) -> Cell:
        head = self._head(label)
        return self._cells.once(
            f"{digest(self._keys[label], seed)}-head", lambda: self._train(label, head, seed)
        )

    def _head(self, label: str) -> PrivateHead:
        """Return the head, which is made when it is first asked for."""
        if label in self._heads:
            return self._heads[label]
        encoder = self._modules[label]
        processing_class = None
        if isinstance(encoder, str):
            encoder = load_encoder(encoder)
        else:  # it must stay as it is, and a head freezes its encoder
            encoder, processing_class = copy.deepcopy(encoder), self._processing_class
        self._check_time(encoder)
        head = private_head(
            encoder, self._public, self._num_labels, num_rows=self.rows,
            processing_class=processing_class, max_length=self._settings.max_length,
        )  # fmt: skip
        sizes = self.rows, self._settings.batch_size, self._num_labels
        code = code_digest(GradGuardTrainer, PrivateHead)
        # A text is hashed as it is, an image by its pixels.
        samples = [
            (sample if isinstance(sample, str) else np.asarray(sample), class_id)
            for use in self._samples.values()
            for sample, class_id in use
        ]
        self._keys[label] = digest(head, sizes, samples, code)
        self._heads[label] = head
        return head

    def _check_time(self, encoder: nn.Module) -> None:
        """Raise an error if there is no time for the features of all samples.

        Raises:
            OutOfTime: If they do not fit.
        """
        count = sum(map(len, self._samples.values()))
        count += len(packaged_sentences()) if self._public is None else MOST_PUBLIC
        if not self._pace.fits(self.seconds_per_parameter * _size(encoder) * count):
            raise OutOfTime

    def _train(self, label: str, head: PrivateHead, seed: int) -> Cell:
        """Train a head on rows that the seed draws, and return its accuracies and its proof."""
        if not self._pace.fits(self._training_seconds.get(label, 0.0)):
            raise OutOfTime
        training, judging = self._rows(label, head, "training"), self._rows(label, head, "judging")
        began = time.monotonic()
        nn.init.zeros_(head.head.weight)
        numbers = np.random.default_rng(seed).permutation(len(training))[: self.rows]
        with tempfile.TemporaryDirectory() as folder:
            args = head.training_arguments(
                folder, num_rows=self.rows, seed=seed,
                per_device_train_batch_size=self._settings.batch_size,
                logging_strategy="no", disable_tqdm=True, use_cpu=head.device.type == "cpu",
            )  # fmt: skip
            trainer = GradGuardTrainer(head, args, train_dataset=training.select(numbers))
            trainer.remove_callback(PrinterCallback)
            trainer.is_trial = True
            trainer.train()
            private = trainer.private_rows
            assert private is not None
            proved = {"noise_multiplier": private.noise_multiplier, "epsilon": private.epsilon}
        with torch.no_grad():
            rows = judging[:]
            features, labels = rows["features"].to(head.device), rows["labels"]
            predicted = head.eval()(features=features).logits.argmax(-1).cpu()
        self._training_seconds[label] = time.monotonic() - began
        return {
            "judging": (predicted == labels).double().tolist(), **proved,
            "directions": head.config.directions, "learning_rate": args.learning_rate,
            "delta": args.defense_kwargs["delta"], "clip": args.defense_kwargs["clip"],
        }  # fmt: skip

    def _rows(self, label: str, head: PrivateHead, use: str) -> Any:
        """Return rows of features and labels of training or judging samples, made once."""
        if (label, use) not in self._prepared:
            samples = self._samples[use]
            rows = [{_column(head): sample, "labels": y} for sample, y in samples]
            self._prepared[label, use] = head.prepare_dataset(rows)
        return self._prepared[label, use]


def _column(head: PrivateHead) -> str:
    """Return the name of the column of samples that a head takes."""
    return "image" if head.takes_images else "text"


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _short(name: str) -> str:
    """Return the last part of a folder's path, or a Hub name as it is."""
    return Path(name).resolve().name if Path(name).is_dir() else name
