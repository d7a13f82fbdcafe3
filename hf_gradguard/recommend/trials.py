"""Short trainings, each by `GradGuardTrainer` itself."""

from __future__ import annotations

import copy
import dataclasses
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PrinterCallback, TrainerCallback

from ..attacks.layer_inputs import is_causal_lm
from ..audit.cells import Cell, Cells, code_digest, digest
from ..audit.client import Modality
from ..data.samples import Sample
from ..defenses import Defense
from ..defenses.dp import DPSGD
from ..leakage import dp_sgd_epsilon, dp_sgd_noise_multiplier
from ..train import accuracy_by_sample
from ..training.config import GradGuardConfig
from ..training.privacy.private_rows import rounding_of_rows
from ..training.trainer import GradGuardTrainer
from .pace import OutOfTime, Pace, Progress
from .trial_settings import WARMUP, TrialSettings

MOST_RATES = 6
"""The most learning rates that are tried for a defense."""


@dataclass(frozen=True)
class Split:
    """A split of samples by their use; samples that are attacked or judge are never trained on.

    Args:
        attacked: Samples to attack.
        choosing: Samples that choose learning rates.
        judging: Samples that give the accuracy that is reported.
        training: All other samples.

    Example:
        >>> split = Split.draw([("a film", 0)] * 100, attacked=8, batch_size=16)
        >>> len(split.attacked), len(split.choosing), len(split.judging), len(split.training)
        (8, 18, 18, 56)
    """

    attacked: list[Sample]
    choosing: list[Sample]
    judging: list[Sample]
    training: list[Sample]

    @classmethod
    def draw(cls, samples: Sequence[Sample], attacked: int, batch_size: int) -> Split:
        """Split samples in random order.

        A fifth of them judges, 1,000 at most, and another fifth chooses, 500 at most.

        Raises:
            ValueError: If too few are left to train on.
        """
        remaining = list(samples[attacked:])
        # They are evaluated at every rate of every defense.
        fifth = len(remaining) // 5
        choosing, judging = min(500, fifth), min(1000, fifth)
        if fifth < 2 or len(remaining) - choosing - judging < batch_size:
            raise ValueError(
                f"{len(samples)} samples are too few: {attacked} are attacked, two fifths of the "
                f"others choose rates and judge, and the rest must fill a batch of {batch_size}."
            )
        return cls(
            list(samples[:attacked]), remaining[:choosing],
            remaining[choosing : choosing + judging], remaining[choosing + judging :],
        )  # fmt: skip


class Trials:
    """Trainings of one model on one split, stored as cells.

    Args:
        model: The model as it starts. It is never changed.
        processing_class: The model's tokenizer or image processor.
        modality: The modality, which makes batches of samples.
        split: The split of the data.
        settings: The settings of all trainings.
        folder: The folder of cells, and of the trained weights of each defense's best rate.
        pace: The pace, which ends trainings that do not fit. Default: all of them fit.
    """

    def __init__(
        self,
        model: nn.Module,
        processing_class: Any,
        modality: Modality,
        split: Split,
        settings: TrialSettings,
        folder: Path,
        pace: Pace | None = None,
    ) -> None:
        self._pace = pace or Pace(math.inf)
        self.model, self.modality, self.split, self.settings = model, modality, split, settings
        self._processing_class = processing_class
        self._cells, self._folder = Cells(folder / "cells"), folder / "cells"
        sizes = (settings.steps, settings.batch_size, settings.max_length, settings.seed)
        judged = [modality.batch(samples) for samples in (split.choosing, split.judging)]
        codes = code_digest(GradGuardTrainer, type(modality))
        self._key = digest(model, judged, len(split.training), sizes, codes)

    def calibrated(self, defense: Defense) -> Defense:
        """Return the defense with the noise that the Trainer finds here for a `target_epsilon`.

        An attack has no training to find it for.
        """
        if not isinstance(defense, DPSGD) or defense.target_epsilon is None:
            return defense
        assert defense.delta is not None  # it was checked with it
        target = defense.target_epsilon, defense.delta
        event = (1.0, 1) if defense.correlated else (self._sampling_rate, self.settings.steps)
        multiplier = dp_sgd_noise_multiplier(*target, *event)
        multiplier *= 1 + rounding_of_rows(self.settings.batch_size)
        return dataclasses.replace(defense, target_epsilon=None, noise_multiplier=multiplier)

    def guarantee_of(self, defense: Defense) -> tuple[float, float] | None:
        """Return ε and δ that hold for each row after a training, or `None` without a proof.

        Args:
            defense: The defense, as `calibrated` returns it.
        """
        if not isinstance(defense, DPSGD) or not defense.per_sample or defense.delta is None:
            return None
        assert defense.noise_multiplier is not None  # it is calibrated
        sigma = defense.noise_multiplier / (1 + rounding_of_rows(self.settings.batch_size))
        event = (1.0, 1)  # all messages together, where noise is correlated
        if not defense.correlated:
            event = self._sampling_rate, self.settings.steps
        return dp_sgd_epsilon(sigma, *event, defense.delta), defense.delta

    @property
    def _sampling_rate(self) -> float:
        return min(1.0, self.settings.batch_size / len(self.split.training))

    def choosing(self, label: str, defense: Defense, rate: float) -> float:
        """Return the accuracy of the first seed's training, on the samples that choose a rate."""
        path = self._weights(label, defense, rate)

        def measured() -> Cell:
            model = self._run(label, defense, rate, path)
            accuracies = sample_accuracies(model, self.modality, self.split.choosing)
            return {"choosing": sum(accuracies) / len(accuracies)}

        return float(self._cells.once(path.stem, measured)["choosing"])

    def judging(
        self, label: str, defense: Defense, rate: float, seed: int | None = None
    ) -> list[float]:
        """Return the accuracy of each judging sample after a training.

        Args:
            label: The label of the defense.
            defense: The defense of every message.
            rate: The learning rate.
            seed: The seed of the training; `None` for the one that chooses rates.
        """
        path = self._weights(label, defense, rate, seed)

        def measured() -> Cell:
            model = self.trained(label, defense, rate, seed)
            return {"judging": sample_accuracies(model, self.modality, self.split.judging)}

        accuracies: list[float] = self._cells.once(f"{path.stem}-judging", measured)["judging"]
        return accuracies

    def is_trained(self, label: str, defense: Defense) -> bool:
        """Return whether an earlier run trained under a defense, at the first of its rates."""
        return self._weights(label, defense, self.middle_rate(defense)).stem in self._cells

    def has_judged(self, label: str, defense: Defense, rate: float, seed: int) -> bool:
        """Return whether an earlier run evaluated this training on the judging samples."""
        return f"{self._weights(label, defense, rate, seed).stem}-judging" in self._cells

    def best(self, label: str, defense: Defense, most: int = MOST_RATES) -> float:
        """Return the best of the tried learning rates, and the smallest of equally good ones.

        The middle rate is tried first, then those beside the best until both of its neighbors are
        worse, in steps of a factor of two.

        Args:
            label: The label of the defense.
            defense: The defense of every message.
            most: The most rates to try, beside those that an earlier run tried.

        Raises:
            OutOfTime: If there is no time for one.
        """
        middle = self.middle_rate(defense)
        tried = {middle: self.choosing(label, defense, middle)}
        while len(tried) < MOST_RATES:
            best = max(tried, key=lambda rate: (tried[rate], -rate))
            is_equal = sum(accuracy == tried[best] for accuracy in tried.values()) > 1
            beyond = [rate for rate in (best * 2, best / 2) if rate not in tried]
            if not beyond or (is_equal and len(tried) > 2):
                break
            # What an earlier run tried counts, and takes no time.
            stored = self._weights(label, defense, beyond[0]).stem in self._cells
            if len(tried) >= most and not stored:
                break
            try:
                tried[beyond[0]] = self.choosing(label, defense, beyond[0])
            except OutOfTime:
                break
        best = max(tried, key=lambda rate: (tried[rate], -rate))
        # Only the chosen training is attacked at its end.
        for rate in tried:
            if rate != best:
                self._weights(label, defense, rate).unlink(missing_ok=True)
        return best

    def drop(self, label: str, defense: Defense, rate: float, seed: int) -> None:
        """Remove the weights of a training that is not attacked."""
        self._weights(label, defense, rate, seed).unlink(missing_ok=True)

    @property
    def final_seeds(self) -> list[int]:
        """The seeds of the trainings that judge finalists."""
        return [self.settings.seed + number for number in range(1, self.settings.seeds + 1)]

    def untrained(self) -> list[float]:
        """Return the accuracy of each judging sample before any training."""
        return sample_accuracies(copy.deepcopy(self.model), self.modality, self.split.judging)

    def measure_speed(self, defenses: Mapping[str, Defense], longest: float = 10.0) -> None:
        """Take four steps under each defense, or as many as begin in time, to measure the pace.

        A twentieth of the time that is left is spent at most. A defense that is not measured for
        lack of it is taken to be as slow as the slowest that was.

        Args:
            defenses: Defenses by label, the undefended one first.
            longest: Seconds after which no further step of a defense begins.
        """
        settings = dataclasses.replace(self.settings, steps=4)
        began, most = time.monotonic(), self._pace.left / 20
        for label, defense in defenses.items():
            if label != "none" and time.monotonic() - began > most:
                self._pace.costs[label] = max([1.0, *self._pace.costs.values()])
                continue
            progress = Progress(self._pace, label, f"measuring speed, {label}", longest)
            rate, model = settings.learning_rate, copy.deepcopy(self.model)
            self._train(model, defense, rate, settings.seed, settings, progress)
            record = self._pace.measured if label == "none" else self._pace.compared
            record(label, progress.step_seconds)

    def middle_rate(self, defense: Defense) -> float:
        """Return the first learning rate to try."""
        # Behind noise the best is 1 to 8 times the undefended one (findings/rates.md).
        ratio = defense.facts.noise_ratio
        return self.settings.learning_rate * (2 if ratio is None or ratio >= 1 else 1)

    def trained(
        self, label: str, defense: Defense, rate: float, seed: int | None = None
    ) -> nn.Module:
        """Return the model after a training, which is run if its weights are not stored."""
        model, path = copy.deepcopy(self.model), self._weights(label, defense, rate, seed)
        if not path.exists():  # it was removed by hand
            self._run(label, defense, rate, path, seed)
        model.load_state_dict(load_file(path), strict=False)
        return model.eval()

    def _weights(self, label: str, defense: Defense, rate: float, seed: int | None = None) -> Path:
        named = (label, defense, rate) if seed is None else (label, defense, rate, seed)
        return self._folder / f"{digest(self._key, *named)}.safetensors"

    def _run(
        self, label: str, defense: Defense, rate: float, path: Path, seed: int | None = None
    ) -> nn.Module:
        seconds = self.settings.steps * self._pace.step_of(label)
        if not self._pace.fits(seconds):
            raise OutOfTime
        model, settings = copy.deepcopy(self.model), self.settings
        progress = Progress(self._pace, label, f"{label}, rate {rate:.2g}")
        seed = settings.seed if seed is None else seed
        self._train(model, defense, rate, seed, settings, progress)
        if progress.is_late:
            raise OutOfTime
        save_file(_state(model), path)
        return model

    def _train(
        self,
        model: nn.Module,
        defense: Defense,
        rate: float,
        seed: int,
        settings: TrialSettings,
        progress: Progress | None = None,
    ) -> None:
        rows, processing_class = self.split.training, self._processing_class
        train(model, defense, rows, self.modality, settings, rate, seed, processing_class, progress)


def train(
    model: nn.Module,
    defense: Defense,
    rows: Sequence[Sample],
    modality: Modality,
    settings: TrialSettings,
    rate: float,
    seed: int,
    processing_class: Any = None,
    progress: TrainerCallback | None = None,
) -> None:
    """Train a model in place, in one process, without output and checkpoints.

    Args:
        model: The model to train.
        defense: The defense of every message. A copy is used.
        rows: Samples to train on.
        modality: The modality, which makes batches of them.
        settings: Settings, of which `steps` and `batch_size` are used.
        rate: The peak learning rate.
        seed: The seed of the order of rows, of dropout and of the defense.
        processing_class: The Trainer's `processing_class`.
        progress: A callback that follows the steps.
    """
    with tempfile.TemporaryDirectory() as folder:
        args = quiet_arguments(
            folder, model, max_steps=settings.steps, learning_rate=rate, warmup_steps=WARMUP,
            per_device_train_batch_size=settings.batch_size, seed=seed,
        )  # fmt: skip
        trainer = GradGuardTrainer(
            model, args, defense=defense.with_state({}), train_dataset=rows,
            data_collator=modality.batch, processing_class=processing_class,
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.is_trial = True
        if progress is not None:
            trainer.add_callback(progress)
        trainer.train()


def quiet_arguments(folder: str, model: nn.Module, **settings: Any) -> GradGuardConfig:
    """Return arguments of a training on the model's device that writes and prints nothing."""
    return GradGuardConfig(
        folder, save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
        remove_unused_columns=False, use_cpu=next(model.parameters()).device.type == "cpu",
        **settings,
    )  # fmt: skip


def sample_accuracies(
    model: nn.Module, modality: Modality, samples: Sequence[Sample]
) -> list[float]:
    """Return each sample's accuracy: 0 or 1, or the fraction of its tokens predicted correctly."""
    model.eval()
    device, accuracies = next(model.parameters()).device, [0.0] * len(samples)
    # Texts of about one length together: half of a mixed batch is padding.
    order = sorted(range(len(samples)), key=lambda number: _length(samples[number][0]))
    for start in range(0, len(samples), 32):
        numbers = order[start : start + 32]
        batch = modality.batch([samples[number] for number in numbers])
        inputs = {name: tensor.to(device) for name, tensor in batch.items()}
        with torch.no_grad():
            predicted = model(**inputs).logits.argmax(-1).cpu()
        in_batch = accuracy_by_sample(predicted, batch["labels"], is_causal_lm(model))
        for number, accuracy in zip(numbers, in_batch, strict=True):
            accuracies[number] = accuracy
    return accuracies


def _length(sample: Any) -> int:
    return len(sample) if isinstance(sample, str | list | tuple) else 0


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    buffers = {n for n, _ in model.named_buffers()}
    state = model.state_dict()
    return {n: t.detach().clone().contiguous() for n, t in state.items() if n in trained | buffers}
