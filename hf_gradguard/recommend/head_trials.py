"""Trials of linear heads by proof, each on the frozen encoder that it names.

Features are made once, and every training takes seconds.
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import concatenate_datasets
from torch import nn
from transformers import PrinterCallback

from ..audit.cells import Cell, Cells, code_digest, digest
from ..data.samples import Sample
from ..flags import SourceSettings
from ..gradient_map.domain import domain_of_model
from ..heads import PrivateHead, private_head
from ..heads.configuration import PrivateHeadConfig
from ..heads.head import load_encoder, taken_of
from ..heads.making import public_samples
from ..heads.processing import load_processing_class, processed
from ..models import label_kind, task_of, without_adapters
from ..training.trainer import GradGuardTrainer
from .evidence import Outcome, Proof, Recognition
from .head_attacks import MOST_ENTRIES, HeadMessages, HeadRows, RowTest
from .intervals import accuracy_over_seeds, lost_over_seeds, mean_over_seeds
from .pace import OutOfTime, Pace
from .trial_settings import TrialSettings
from .trials import Split

_LABEL = "head on {}"
_CHUNK = 320  # samples whose features are made before the time is looked at
_TIMED = 16  # samples that show how long an encoder takes
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
            "nobody's secret. Name a folder or file of them, preferably thousands (--public "
            "FOLDER). The same command then tries a head, and takes the rest from what it stored."
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


def public_for(model: nn.Module, public: Any) -> list[Any]:
    """Return the public samples of heads, at most as many as a head looks at.

    Args:
        model: The model that is to be trained, which takes texts or images.
        public: Samples, their file or folder, or `None` for the sentences of this package.

    Raises:
        ValueError: If there are fewer than three.
    """
    samples, description = public_samples(public, domain_of_model(model).name == "image")
    if len(samples) < 3:
        raise ValueError(f"--public has {description}: give three or more, preferably thousands.")
    return list(samples)


class HeadTrials:
    """Trainings of heads by proof on one split, stored as cells.

    Args:
        encoders: Encoders by name, as `heads_to_try` returns them.
        processing_class: The tokenizer or image processor of those that are no names.
        num_labels: The number of classes.
        public: Public samples, as `public_for` returns them.
        public_file: The file or folder that they are from, which `gradguard train` is told of.
        split: The split of the data. Samples that choose others' rates are trained on: a head's
            rate is not chosen.
        settings: The settings of all trials. A head is trained on as many samples as the others:
            `steps` messages of `batch_size`, or one pass if there are fewer rows.
        folder: The folder of cells.
        pace: The pace of all trials.

    Attributes:
        encoders: The names of encoders, by the label of their head.
    """

    def __init__(
        self,
        encoders: Mapping[str, str | nn.Module],
        processing_class: Any,
        num_labels: int,
        public: Sequence[Any],
        public_file: str | None,
        split: Split,
        settings: TrialSettings,
        folder: Path,
        pace: Pace,
    ) -> None:
        self.encoders = _labels(list(encoders))
        self._modules = dict(zip(self.encoders, encoders.values(), strict=True))
        self._processing_class, self._num_labels = processing_class, num_labels
        self._public, self._public_file, self._settings = public, public_file, settings
        self._cells, self._pace = Cells(folder / "cells"), pace
        size = settings.batch_size
        self._samples = {
            "training": [*split.training, *split.choosing], "judging": split.judging
        }  # fmt: skip
        count = len(self._samples["training"])
        self.rows = min(count, settings.steps * size) // size * size
        self._heads, self._keys = dict[str, PrivateHead](), dict[str, str]()
        self._loaded = dict[str, tuple[nn.Module, Any]]()
        self._prepared = dict[tuple[str, str], Any]()
        self._training_seconds = dict[str, float]()

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

        The best test of all messages is run on each training, unless it would take gigabytes.

        Args:
            label: The label of the head.
            accuracies: The accuracy of each judging sample, for each training, in order of seeds.
            plain_accuracies: The same of the undefended whole model, maybe of fewer trainings.
        """
        cell = self._trained(label, self._settings.seed)
        proof = Proof(
            cell["noise_multiplier"], cell["epsilon"], cell["delta"], self.encoders[label],
            self.rows,
        )  # fmt: skip
        trainings = [
            self._trained(label, self._settings.seed + number) for number in range(len(accuracies))
        ]
        return Outcome(
            label, cell["learning_rate"], accuracy_over_seeds(accuracies),
            lost_over_seeds(plain_accuracies, accuracies), None,
            accuracy_by_sample=dict(enumerate(np.mean(accuracies, axis=0).tolist())),
            trainings=np.mean(accuracies, axis=1).tolist(), proof=proof,
            recognition=_recognition(trainings),
        )  # fmt: skip

    def flags_of(self, label: str) -> dict[str, Any]:
        """Return the flags by which `gradguard train` trains this head as it was tried."""
        cell = self._trained(label, self._settings.seed)
        public = {} if self._public_file is None else {"public": self._public_file}
        return {
            "head": True, "encoder": self.encoders[label], **public,
            **{name: cell[name] for name in _TRAINED_WITH},
            "per_device_train_batch_size": self._settings.batch_size,
            "max_steps": self.rows // self._settings.batch_size,
        }  # fmt: skip

    def _trained(self, label: str, seed: int) -> Cell:
        return self._cells.once(
            f"{digest(self._key(label), seed)}-head",
            lambda: self._train(label, self._head(label), seed),
        )

    def _key(self, label: str) -> str:
        """Return a key of all that decides a head's trainings but the seed.

        It takes no features, so what is stored is found in seconds.
        """
        if label not in self._keys:
            # A text is hashed as it is, an image by its pixels.
            samples = [
                (_hashed(sample), class_id)
                for use in self._samples.values()
                for sample, class_id in use
            ]
            self._keys[label] = digest(
                _reader(self._encoder(label)[0]), self._inputs_of(label, self._public[:_TIMED]),
                list(map(_hashed, self._public)), samples, self.rows, self._num_labels,
                self._settings.batch_size, self._settings.max_length,
                code_digest(GradGuardTrainer, PrivateHead, RowTest),
            )  # fmt: skip
        return self._keys[label]

    def _encoder(self, label: str) -> tuple[nn.Module, Any]:
        """Return an encoder, and its tokenizer or image processor."""
        if label not in self._loaded:
            encoder, processing_class = self._modules[label], self._processing_class
            if isinstance(encoder, str):
                name, encoder = encoder, load_encoder(encoder)
                takes_images = domain_of_model(encoder).name == "image"
                processing_class = load_processing_class(name, takes_images)
            else:  # it must stay as it is, and a head freezes its encoder
                encoder = copy.deepcopy(encoder)
            self._loaded[label] = encoder, processing_class
        return self._loaded[label]

    def _head(self, label: str) -> PrivateHead:
        """Return the head, which is made when it is first asked for."""
        if label not in self._heads:
            self._check_time(label)
            encoder, processing_class = self._encoder(label)
            self._heads[label] = private_head(
                encoder, self._public, self._num_labels, num_rows=self.rows,
                processing_class=processing_class, max_length=self._settings.max_length,
            )  # fmt: skip
        return self._heads[label]

    def _inputs_of(self, label: str, samples: Sequence[Any]) -> dict[str, Any]:
        """Return an encoder's inputs for a few samples."""
        encoder, processing_class = self._encoder(label)
        reader = _reader(encoder)
        config = PrivateHeadConfig(
            encoder_config=reader.config.to_dict(), max_length=self._settings.max_length
        )
        is_image = domain_of_model(reader).name == "image"
        inputs = processed(processing_class, samples, is_image, config)
        device = next(reader.parameters()).device
        return {name: tensor.to(device) for name, tensor in inputs.items()}

    def _check_time(self, label: str) -> None:
        """Raise an error if there is no time for the features of all samples.

        A few samples of about a mean length show how long they take at this encoder.

        Raises:
            OutOfTime: If they do not fit.
        """
        reader, seconds = _reader(self._encoder(label)[0]), 0.0
        for samples in (self._public, *map(_inputs, self._samples.values())):
            timed = _usual(samples, _TIMED)
            inputs = self._inputs_of(label, timed)
            with torch.no_grad():
                reader(**inputs)  # the first pass takes longer
                began = time.monotonic()
                reader(**inputs)
            seconds += (time.monotonic() - began) * len(samples) / len(timed)
        if not self._pace.fits(seconds):
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
            rows, transcript = training.select(numbers), HeadMessages()
            entries = self.rows // self._settings.batch_size * head.head.weight.numel()
            is_tested = entries <= MOST_ENTRIES
            callbacks = [transcript] if is_tested else []
            trainer = GradGuardTrainer(head, args, train_dataset=rows, callbacks=callbacks)
            trainer.remove_callback(PrinterCallback)
            trainer.is_trial = True
            trainer.train()
            private = trainer.private_rows
            assert private is not None
            proved = {"noise_multiplier": private.noise_multiplier, "epsilon": private.epsilon}
        judged = HeadRows(**judging[:])
        with torch.no_grad():
            predicted = head.eval()(features=judged.features.to(head.device)).logits.argmax(-1)
        recognized = dict[str, list[float]]()
        if is_tested:
            test = RowTest(transcript, private, HeadRows(**rows[:]))
            recognized = test.recognized(judged, seed)._asdict()
        self._training_seconds[label] = time.monotonic() - began
        return {
            "judging": (predicted.cpu() == judged.labels).double().tolist(), **proved,
            **recognized,
            "directions": head.config.directions, "learning_rate": args.learning_rate,
            "delta": args.defense_kwargs["delta"], "clip": args.defense_kwargs["clip"],
        }  # fmt: skip

    def _rows(self, label: str, head: PrivateHead, use: str) -> Any:
        """Return rows of features and labels of training or judging samples, made once.

        Raises:
            OutOfTime: If they cannot be made in time. What was made is stored.
        """
        if (label, use) not in self._prepared:
            rows = [{_column(head): sample, "labels": y} for sample, y in self._samples[use]]
            prepared, began = list[Any](), time.monotonic()
            for start in range(0, len(rows), _CHUNK):
                seconds = (time.monotonic() - began) * (len(rows) - start) / max(1, start)
                if start and not self._pace.fits(seconds):
                    raise OutOfTime
                prepared.append(head.prepare_dataset(rows[start : start + _CHUNK]))
            self._prepared[label, use] = concatenate_datasets(prepared).with_format("torch")
        return self._prepared[label, use]


def _recognition(trainings: Sequence[Cell]) -> Recognition | None:
    """Return what tests found, over messages and trainings.

    It is `None` if nothing was tested, or one message, which has no interval.
    """
    if len(trainings[0].get("rows_found", [])) < 2:
        return None
    rows_found, told_apart = (
        mean_over_seeds([training[name] for training in trainings], are_fractions=True)
        for name in ("rows_found", "told_apart")
    )
    return Recognition(*(replace(e, low=max(0.0, e.low or 0.0)) for e in (rows_found, told_apart)))


def _column(head: PrivateHead) -> str:
    """Return the name of the column of samples that a head takes."""
    return "image" if head.takes_images else "text"


def _reader(encoder: nn.Module) -> Any:
    """Return the part of a model that features are taken of."""
    return taken_of(getattr(encoder, "base_model", encoder)).eval()


def _hashed(sample: Any) -> Any:
    return sample if isinstance(sample, str) else np.asarray(sample)


def _inputs(samples: Sequence[Sample]) -> list[Any]:
    return [sample for sample, _ in samples]


def _usual(samples: Sequence[Any], count: int) -> list[Any]:
    """Return the samples whose length is nearest the mean: padding takes as long as words do."""
    if not isinstance(samples[0], str):
        return list(samples[:count])
    mean = sum(map(len, samples)) / len(samples)
    return sorted(samples, key=lambda sample: abs(len(sample) - mean))[:count]


def _labels(names: Sequence[str]) -> dict[str, str]:
    """Return encoders' names by the labels of their heads: short, unless two would be alike."""
    short = list(map(_short, names))
    return {
        _LABEL.format(name if short.count(short_name) > 1 else short_name): name
        for name, short_name in zip(names, short, strict=True)
    }


def _short(name: str) -> str:
    """Return the last part of a folder's path, or a Hub name as it is."""
    # As it was typed: a link may lead to a folder that is called "model".
    return os.path.basename(os.path.abspath(name)) if os.path.isdir(name) else name
