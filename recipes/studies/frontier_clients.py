"""One client's training under a defense, as `GradGuardTrainer` does it, and what is kept of it."""

import functools
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback, set_seed

from hf_gradguard import GradGuardConfig, GradGuardTrainer, make_defense
from hf_gradguard.defenses.pruning import PruningDefense
from hf_gradguard.leakage import dp_sgd_epsilon
from recipes.small_networks import SmallImageClassifier, SmallImageClassifierConfig

from .frontier_rows import BATCH, DELTA, IMAGE_SIZES, RATES_SEED, STAGES
from .lib.defenses import with_own_strength
from .lib.device import DEVICE, on_device
from .lib.images import images_at, predicted_classes
from .lib.text import TEXT_FLAGS as TEXT_FLAGS
from .lib.text import load_classifier, load_tokenizer, sst2

IMAGE_FLAGS = {
    "--train": "parquet with img and label, to train on",
    "--test": "the same, to judge on",
    "--images": "npz with x (N, 32, 32, 3) and y: images to attack",
}


class Stage(NamedTuple):
    """A client in its own training.

    Args:
        model: As it is then, without dropout.
        defense: The client's, with what it remembers.
        batches: Of how many batches each entry of its next message is the sum, where a pruning
            feeds back what it left out: everybody can count it.
    """

    model: nn.Module
    defense: Any
    batches: dict[str, Tensor] | None = None


class Client:
    """Trainings of one client. A subclass has the model and the data: `start(seed)`,
    `rows_to_learn()` without the first `HELD_OUT`, `held_out()`, on which rates are chosen,
    `test_rows` to judge on, and `right(model, rows)`, `(N,)`: which rows are classified rightly.
    What was trained is kept in `folder`.
    """

    processing_class: Any = None
    test_rows: Any
    HELD_OUT: int

    def __init__(self, folder: str | Path | None = None) -> None:
        torch.set_num_threads(1)
        self.folder = folder and Path(folder)
        self._scratch = tempfile.TemporaryDirectory()

    def train(self, cell: dict, keep: bool = False) -> nn.Module:
        """By the cell's defense, rate, steps, batch and seed."""
        trainer = self.trainer(self.start(cell["seed"]), self.rows_to_learn(), cell)
        if keep:
            trainer.add_callback(_Keeper(trainer, self, cell))
        trainer.train()
        return trainer.model

    def trained(self, cell: dict) -> dict:
        """Metrics of a training: by the seed that chooses rates, or another one."""
        return self.on_held_out(cell) if cell["seed"] == RATES_SEED else self.learned(cell)

    def on_held_out(self, cell: dict) -> dict:
        """What a rate is chosen by."""
        model = self.train(cell)
        return {"held_out": round(float(self.right(model, self.held_out()).mean()), 4)}

    def learned(self, cell: dict) -> dict:
        """Accuracies, which test rows are right, and what a proof says; the training is kept."""
        model = self.train(cell, keep=True)
        right = self.right(model, self.test_rows)
        held_out = self.right(model, self.held_out())
        metrics = judgment(right) | {"held_out": float(held_out.mean())}
        noise = cell["strength"].get("noise_multiplier")
        if noise is not None:
            chance = cell["batch"] / len(self.rows_to_learn())
            metrics["epsilon"] = dp_sgd_epsilon(noise, chance, cell["steps"], DELTA)
        return metrics

    def trainer(self, model: nn.Module, rows: Any, cell: dict) -> GradGuardTrainer:
        """One client. It logs at the end, and keeps nothing."""
        args = GradGuardConfig(
            self._scratch.name, defense=cell["defense"],
            defense_kwargs=with_own_strength(cell["strength"]), max_steps=cell["steps"],
            learning_rate=cell["learning_rate"], warmup_steps=0.1,
            per_device_train_batch_size=cell["batch"], seed=cell["seed"],
            noise_seed=cell["seed"], save_strategy="no",
            logging_steps=cell["steps"], report_to="none", disable_tqdm=True,
        )  # fmt: skip
        return GradGuardTrainer(
            model, args, train_dataset=rows, processing_class=self.processing_class
        )

    def stage(self, cell: dict, stage: str) -> Stage:
        """A client at a stage of its training, which is run if it was not kept."""
        folder = self.folder_of(cell)
        if not (folder / "end.defense").exists():
            self.train(cell, keep=True)
        model = self.start(cell["seed"])
        model.load_state_dict(load_file(folder / f"{stage}.safetensors"), strict=False)
        model.to(DEVICE)
        defense = make_defense(cell["defense"], **with_own_strength(cell["strength"]))
        defense.prepare(model, self.processing_class)
        defense.load_state_dict(load_file(folder / f"{stage}.defense", device=DEVICE))
        return Stage(model.eval(), defense, _batch_counts(defense))

    def folder_of(self, cell: dict) -> Path:
        assert self.folder is not None
        strength = "-".join(f"{k}={v}" for k, v in cell["strength"].items())
        numbers = [cell[k] for k in ("learning_rate", "steps", "batch", "seed")]
        return self.folder / "-".join(map(str, (cell["defense"], strength, *numbers)))


class _Keeper(TrainerCallback):
    """Keeps model and defense at every stage."""

    def __init__(self, trainer: GradGuardTrainer, client: Client, cell: dict) -> None:
        self._trainer, self._folder = trainer, client.folder_of(cell)
        warmup = trainer._clients[
            0
        ].defense.facts.warmup_messages  # nothing can be recovered from these
        self._stages = {name: max(warmup, round(s * cell["steps"])) for name, s in STAGES.items()}
        self._folder.mkdir(parents=True, exist_ok=True)

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._keep(0)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self._keep(state.global_step)

    def _keep(self, step: int) -> None:
        for stage in (name for name, stage_step in self._stages.items() if stage_step == step):
            model = self._trainer.model
            weights = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
            save_file(weights, self._folder / f"{stage}.safetensors")
            client = self._trainer._clients[0]
            state = client.defense.flatten(client.state)
            state = {name: tensor.contiguous() for name, tensor in state.items()}
            save_file(state, self._folder / f"{stage}.defense")


def _batch_counts(defense: Any) -> dict[str, Tensor] | None:
    """What a pruning counts, and everybody can count: of how many batches the next entries are."""
    residual = defense.state.get("residual") if isinstance(defense, PruningDefense) else None
    if residual is None or not residual.batches:
        return None
    return {name: count.short() + 1 for name, count in residual.batches.items()}


def judgment(right: np.ndarray) -> dict[str, Any]:
    """What is kept of which rows are right: runs are paired by them."""
    bits = np.packbits(right).tobytes().hex()
    return {"accuracy": float(right.mean()), "right": bits, "of": len(right)}


class TextTask(Client):
    """Sentences of SST-2, the encoder, and trainings on them."""

    HELD_OUT, LENGTH, TEST = 500, 64, ("dev", "test_labelled_sst")

    def __init__(self, model: str, data_dir: str, folder: str | Path | None = None) -> None:
        super().__init__(folder)
        self.name, self.data_dir = model, data_dir
        self.tokenizer = self.processing_class = load_tokenizer(model)

    @functools.cached_property
    def train_rows(self) -> Dataset:
        return self._encoded("train").shuffle(seed=0)

    @functools.cached_property
    def test_rows(self) -> list[dict]:
        return [row for split in self.TEST for row in self._encoded(split)]

    def _encoded(self, split: str) -> Dataset:
        return sst2(self.data_dir, split).map(
            lambda row: self.tokenizer(row["sentence"], truncation=True, max_length=self.LENGTH),
            remove_columns=["sentence"],
        )

    def start(self, seed: int) -> nn.Module:
        """The encoder with the head that a seed gives it."""
        set_seed(seed)
        return load_classifier(self.name, num_labels=2)

    def rows_to_learn(self) -> Dataset:
        return self.train_rows.select(range(self.HELD_OUT, len(self.train_rows)))

    def held_out(self) -> Dataset:
        return self.train_rows.select(range(self.HELD_OUT))

    def right(self, model: nn.Module, rows) -> np.ndarray:
        model.eval()
        right = np.zeros(len(rows), dtype=bool)
        for indices, batch in self.by_length(rows):
            with torch.no_grad():
                classes = model(**batch.to(model.device)).logits.argmax(1).tolist()
            pairs = zip(classes, indices, strict=True)
            right[indices] = [label == rows[i]["label"] for label, i in pairs]
        return right

    def by_length(self, rows) -> Iterator[tuple[list[int], Mapping[str, Tensor]]]:
        """Batches of 64 texts of about one length, and which rows they are."""
        ids = [row["input_ids"] for row in rows]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        for start in range(0, len(ids), 64):
            indices = order[start : start + 64]
            texts = [{"input_ids": ids[i]} for i in indices]
            yield indices, self.tokenizer.pad(texts, return_tensors="pt")

    def later_batches(self) -> Iterator[dict[str, Tensor]]:
        """Batches to come, of rows that nobody trained on."""
        rows = self.held_out()
        for start in range(0, len(rows) - BATCH + 1, BATCH):
            batch_rows = [rows[i] for i in range(start, start + BATCH)]
            texts = [{"input_ids": row["input_ids"]} for row in batch_rows]
            batch = dict(self.tokenizer.pad(texts, return_tensors="pt"))
            yield on_device(batch | {"labels": torch.tensor([row["label"] for row in batch_rows])})


class Network(SmallImageClassifier):
    """Convolutions with group normalization and GELU, of stride 2 and then with average pooling,
    and one dense layer: smooth, so that gradient matching can invert it. 69,514 parameters.
    """

    config_class = SmallImageClassifierConfig
    WIDTHS: tuple[int, ...] = (24, 48, 96)

    def __init__(self, config: SmallImageClassifierConfig) -> None:
        super().__init__(config)
        layers = list[nn.Module]()
        widths = self.WIDTHS
        for number, (inputs, outputs) in enumerate(
            zip((config.num_channels, *widths), widths, strict=False)
        ):
            kernel, stride = (3, 1) if number else (5, 2)
            layers.append(nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2))
            layers += [nn.GroupNorm(8, outputs), nn.GELU()]
            layers += [nn.AvgPool2d(2)] if number else []
        side = config.image_size // 2 ** len(widths)
        self.layers = nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(widths[-1] * side**2, config.num_labels)
        )

    def logits(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.layers(2 * pixel_values - 1)
        return logits


class ImageRows(torch.utils.data.Dataset):
    """`pixels` (N, C, H, W) in uint8 and `labels` as a client's rows, flipped at random."""

    def __init__(self, pixels: Tensor, labels: Tensor, flip: bool = True) -> None:
        self.pixels, self.labels, self._flip = pixels, labels, flip

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        pixels = self.pixels[row].float() / 255
        flipped = pixels.flip(-1) if self._flip and torch.rand(()) < 0.5 else pixels
        return {"pixel_values": flipped, "labels": self.labels[row]}


class ImageTask(Client):
    """Images, the network, which starts from nothing, and trainings on them."""

    HELD_OUT = 2000
    flips, judged = True, "test"  # whether rows are flipped; which split of an npz judges

    def __init__(self, train: str, test: str, folder: str) -> None:
        super().__init__(folder)
        self._train, self._test = train, test

    @functools.cached_property
    def train_rows(self) -> tuple[Tensor, Tensor]:
        pixels, labels = images_at(self._train, "train")
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        return pixels[order], labels[order]

    @functools.cached_property
    def test_rows(self) -> tuple[Tensor, Tensor]:
        return images_at(self._test, self.judged)

    def start(self, seed: int) -> nn.Module:
        set_seed(seed)
        return Network(SmallImageClassifierConfig())

    def rows_to_learn(self) -> ImageRows:
        return ImageRows(*(tensor[self.HELD_OUT :] for tensor in self.train_rows), flip=self.flips)

    def held_out(self) -> tuple[Tensor, Tensor]:
        pixels, labels = self.train_rows
        return pixels[: self.HELD_OUT], labels[: self.HELD_OUT]

    def later_batches(self) -> Iterator[dict[str, Tensor]]:
        """Batches to come, of rows that nobody trained on."""
        batches = (tensor.split(IMAGE_SIZES["batch"]) for tensor in self.held_out())
        for x, y in zip(*batches, strict=True):
            yield on_device({"pixel_values": x.float() / 255, "labels": y})

    def right(self, model: nn.Module, rows: tuple[Tensor, Tensor]) -> np.ndarray:
        pixels, labels = rows
        return (predicted_classes(model.eval(), pixels).cpu() == labels).numpy()


def row_of(defense: str, strength: dict) -> str:
    settings = [f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in strength.items()]
    return " ".join([defense, *settings])
