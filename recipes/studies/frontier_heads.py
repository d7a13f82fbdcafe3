"""Where nothing but a linear head on frozen embeddings is shared, each sample clipped."""

import functools
import itertools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import AutoModel, PreTrainedModel, set_seed
from transformers.modeling_outputs import SequenceClassifierOutput

from ..head import SHRINKAGE, whitening_of
from . import frontier_clients as clients
from . import frontier_rows as plan
from . import frontier_tables as tables
from .frontier_attacks import CHANCE, GRAY, NOISE_ALONE, attack_images, attack_texts
from .frontier_texts import usual_sentences
from .lib.device import DEVICE, on_device
from .lib.images import public_images
from .lib.tables import write_table
from .lib.text import of_usual_length, sst2
from .patch_features import PatchFeatures
from .rate_search import RateStudy, best_rates

PLAIN = "`none`"
EMBEDDINGS = {1: "last layer", 4: "last four layers"}  # Devlin et al. (2019), Table 7


class Rows(Dataset):
    """Tensors `{name: (N, ...)}` as a client's rows."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors["labels"])

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: tensor[row] for name, tensor in self.tensors.items()}


class FeaturesTask(clients.Client):
    """Trainings of heads, on features that are made once and kept. A subclass has `HELD_OUT` and
    `rows_of(name)`: features (N, width) and `labels` (N,) of the rows of that name.
    """

    @functools.cached_property
    def train_rows(self) -> dict[str, Tensor]:
        return self.rows_of("train")

    @functools.cached_property
    def test_rows(self) -> dict[str, Tensor]:
        return self.rows_of("test")

    def rows_to_learn(self) -> Rows:
        return Rows({name: rows[self.HELD_OUT :] for name, rows in self.train_rows.items()})

    def held_out(self) -> dict[str, Tensor]:
        return {name: rows[: self.HELD_OUT] for name, rows in self.train_rows.items()}

    @torch.no_grad()
    def right(self, model: nn.Module, rows: dict[str, Tensor]) -> np.ndarray:
        classes = model.to(DEVICE)(**on_device(rows)).logits.argmax(1)
        return (classes.cpu() == rows["labels"]).numpy()


class EmbeddingsTask(FeaturesTask):
    """Features are whitened embeddings. A subclass has `whitening`, and `embed(name)`: `embeddings`
    (N, width) and `labels` (N,) of the rows of that name.

    Args:
        folder: Keeps what was trained.
        embeddings: Keeps embeddings as the encoder makes them, before they are whitened.
    """

    def __init__(self, folder: Path, embeddings: Path) -> None:
        super().__init__(folder)
        self._embeddings = embeddings

    @torch.no_grad()
    def rows_of(self, name: str) -> dict[str, Tensor]:
        rows = self.stored(name)
        return rows | {"embeddings": self.whitening(rows["embeddings"])}

    def stored(self, name: str) -> dict[str, Tensor]:
        """As the encoder makes them."""
        path = self._embeddings / f"embeddings-{name}.safetensors"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(self.embed(name), path)
        return load_file(path)


def head_output(
    head: nn.Linear, embeddings: Tensor, labels: Tensor | None
) -> SequenceClassifierOutput:
    logits = head(embeddings)
    loss = None if labels is None else F.cross_entropy(logits, labels)
    return SequenceClassifierOutput(loss=loss, logits=logits)


class MeanPooled(nn.Module):
    """A frozen encoder, the means of its last layers' states, perhaps whitened, and a linear head,
    which alone is shared. It takes texts, or `embeddings` that were made of them before.
    """

    def __init__(
        self, encoder: PreTrainedModel, layers: int, whitening: nn.Module, labels: int = 2
    ) -> None:
        super().__init__()
        self.config, self.layers = encoder.config, layers
        self.encoder = encoder.requires_grad_(False)
        self.whitening = whitening.requires_grad_(False)
        self.head = nn.Linear(layers * encoder.config.hidden_size, labels)

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.get_input_embeddings()

    def embed(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`(B, T)` or `(B, T, width)` to `(B, layers · width)`."""
        states = self.encoder(
            input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds,
            output_hidden_states=True,
        ).hidden_states  # fmt: skip
        concatenated = torch.cat(states[-self.layers :], -1)
        if attention_mask is None:
            return self.whitening(concatenated.mean(1))
        attended = attention_mask[..., None].to(concatenated)
        return self.whitening((concatenated * attended).sum(1) / attended.sum(1))

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None, embeddings: Tensor | None = None,
        labels: Tensor | None = None, **kwargs,
    ) -> SequenceClassifierOutput:  # fmt: skip
        if embeddings is None:
            embeddings = self.embed(input_ids, attention_mask, inputs_embeds)
        return head_output(self.head, embeddings, labels)


class TextHeadTask(EmbeddingsTask):
    """Heads on sentence embeddings. Those are whitened if there is a `public` text, a paragraph a
    line.
    """

    PUBLIC = 5000  # sentences by which embeddings are whitened

    def __init__(
        self, model: str, data_dir: str, folder: str, layers: int = 1, public: str | None = None
    ) -> None:
        name = f"layers-{layers}"
        trained = name if public is None else f"{name}-whitened"
        super().__init__(Path(folder) / trained, Path(folder) / name)
        self.texts = clients.TextTask(model, data_dir)
        self.HELD_OUT, self.tokenizer = self.texts.HELD_OUT, self.texts.tokenizer
        self._layers, self._public = layers, public

    def start(self, seed: int) -> MeanPooled:
        """The encoder with the head that a seed gives it."""
        return self._started(seed, self.whitening)

    def _started(self, seed: int, whitening: nn.Module) -> MeanPooled:
        set_seed(seed)
        encoder = AutoModel.from_pretrained(self.texts.name, trust_remote_code=False)
        return MeanPooled(encoder, self._layers, whitening).eval()

    @functools.cached_property
    def whitening(self) -> nn.Module:
        """By sentences that are nobody's secret."""
        if self._public is None:
            return nn.Identity()
        return whitening_of(self.stored("public")["embeddings"], SHRINKAGE)

    def _rows(self, name: str):
        if name != "public":
            return self.texts.train_rows if name == "train" else self.texts.test_rows
        assert self._public is not None
        sentences = usual_sentences(self._public)
        random.Random(0).shuffle(sentences)
        cut = {"truncation": True, "max_length": self.texts.LENGTH}
        rows = self.tokenizer(sentences[: self.PUBLIC], **cut)
        return [{"input_ids": ids, "label": 0} for ids in rows["input_ids"]]

    @torch.no_grad()
    def embed(self, name: str) -> dict[str, Tensor]:
        rows, model = self._rows(name), self._started(0, nn.Identity()).to(DEVICE)
        embeddings = torch.zeros(len(rows), model.head.in_features)
        for indices, batch in self.texts.by_length(rows):
            batch = on_device(batch)
            embeddings[indices] = model.embed(batch["input_ids"], batch["attention_mask"]).cpu()
        return {"embeddings": embeddings, "labels": torch.tensor([row["label"] for row in rows])}


class Texts(RateStudy):
    """Accuracy on SST-2 where nothing but a linear head is shared, each sample clipped, and what
    attackers recover at the start, in the middle and at the end of training.

    Conditions and figures: docs/findings/heads.md.
    """

    ARGUMENTS = clients.TEXT_FLAGS | plan.FOLDER | {
        "--public": "a public text, WikiText-2's training part, a paragraph a line"
    }  # fmt: skip
    ROWS, QUICK_ROW = plan.HEAD_ROWS, plan.QUICK_HEAD
    ATTACKS, QUICK_ATTACKS = plan.HEAD_ATTACKS, plan.QUICK_HEAD_ATTACKS
    GUESSED = "tag"  # of which attacker is shown what it makes of noise alone

    def cells(self) -> dict:
        """Rates first, then what takes the best of them."""
        cells: dict = {}
        for row in [self.QUICK_ROW] if self.quick else self.ROWS:
            common: dict[str, Any] = {"steps": row.steps, "batch": row.batch}
            if row.layers > 1:
                common["layers"] = row.layers
            if row.is_whitened:
                common["whitened"] = True
            shape = f"{self.embeddings(common)}, {row.steps:,} messages of {row.batch:,}"
            defended = {f"{PLAIN}, {shape}": {"defense": "none", "strength": {}}}
            for multiplier in row.multipliers:
                ((_, strength),) = plan.dp_sgd(multiplier)
                cell = {"defense": "dp_sgd", "strength": strength}
                defended[f"`dp_sgd` {multiplier:g}, {shape}"] = cell
            for name, defense in defended.items():
                tried = defense | common | {"seed": plan.RATES_SEED}
                search = self.search(tried, plan.HEAD_GRID, plan.HEAD_RATE, plan.SPREAD)
                seeds = range(1 if self.quick else row.seeds)
                cells |= self.rated_cells(name, search, defense | common, seeds)
                if (rate := self.best(search)) is not None:
                    trained = defense | common | {"learning_rate": rate}
                    cells |= self.attack_cells(name, trained, row, seeds)
        # The slow ones come last.
        return dict(sorted(cells.items(), key=lambda pair: pair[1].get("attack") == "tag"))

    def attack_cells(self, name: str, cell: dict, row: plan.HeadRow, seeds: range) -> dict:
        """Attacks on some of the seeds."""
        cells: dict = {}
        attacks = self.QUICK_ATTACKS if self.quick else self.ATTACKS
        for attack, (count, settings, stages) in attacks.items():
            if attack[0] not in row.attackers:
                continue
            is_list = attack in (plan.CANDIDATES, plan.UNLABELED)
            attacked_seeds = seeds[: row.attacked_seeds if is_list else 1]
            for seed, stage in itertools.product(attacked_seeds, stages):
                place = tables.place_of(attack, stage)
                attacked = (
                    cell | tables.attack_cell(attack, count, settings, stage) | {"seed": seed}
                )
                cells[name, place, str(seed)] = attacked
                if cell["defense"] == "none" and attack[0] == self.GUESSED and seed == 0:
                    chance = f"{CHANCE}, {self.embeddings(cell)}"
                    cells[chance, place, "0"] = attacked | {NOISE_ALONE: True}
        return cells

    def embeddings(self, cell: Mapping) -> str:
        return EMBEDDINGS[cell.get("layers", 1)] + (" whitened" if "whitened" in cell else "")

    def load(self) -> None:
        args, self.texts = self.args, of_usual_length(sst2(self.args.data_dir))
        self.task = functools.cache(
            lambda layers, is_whitened: TextHeadTask(
                args.model, args.data_dir, args.models, layers, args.public if is_whitened else None
            )
        )

    def measure(self, cell: dict) -> dict:
        task = self.task(cell.get("layers", 1), "whitened" in cell)
        if "attack" not in cell:
            return task.trained(cell)
        return attack_texts(cell, task.stage(cell, cell["stage"]), task.tokenizer, self.texts)

    def report(self, metrics: dict) -> None:
        places = dict.fromkeys(place for cells in metrics.values() for place in cells)
        columns = [place for place in places if place not in (tables.RATES, tables.ACCURACY)]
        rows, epsilons = [], tables.epsilons_of(metrics)
        for row, cells in metrics.items():
            runs, rates = cells.get(tables.ACCURACY, {}), cells.get(tables.RATES, {})
            plain = metrics.get(f"{PLAIN}, {row.partition(', ')[2]}", {}).get(tables.ACCURACY, {})
            shown = [row, f"{best_rates({row: rates})[row]:g}" if rates else ""]
            shown += [tables.accuracy_text(runs), tables.lost(runs, plain), epsilons.get(row, "")]
            rows.append(shown + [tables.score_text(cells.get(column, {})) for column in columns])
        header = ["", "rate", "accuracy", "less than none", tables.PROOF, *columns]
        write_table(self.output, header, rows)


class ImageHead(nn.Module):
    """Frozen features, whitened, and a linear head, which alone is shared. It takes images, or
    `embeddings` that were made of them before.
    """

    def __init__(self, features: nn.Module, whitening: nn.Linear, labels: int = 10) -> None:
        super().__init__()
        self.features = features.requires_grad_(False)
        self.whitening = whitening.requires_grad_(False)
        self.head = nn.Linear(whitening.out_features, labels)

    def forward(
        self, pixel_values: Tensor | None = None, embeddings: Tensor | None = None,
        labels: Tensor | None = None, **kwargs,
    ) -> SequenceClassifierOutput:  # fmt: skip
        if embeddings is None:
            assert pixel_values is not None
            embeddings = self.whitening(self.features(pixel_values))
        return head_output(self.head, embeddings, labels)


class ImageHeadTask(EmbeddingsTask):
    """Heads on features of `public` images, an npz."""

    FILTERS, PUBLIC = 200, 3000  # images by which features are made and whitened

    def __init__(self, train: str, test: str, folder: str, public: str) -> None:
        super().__init__(Path(folder) / "image-heads", Path(folder) / "image-heads")
        self._images, self._public = clients.ImageTask(train, test, folder), public
        self.HELD_OUT = self._images.HELD_OUT

    @functools.cached_property
    def _public_images(self) -> Tensor:
        return public_images(self._public, self.PUBLIC)

    @functools.cached_property
    def features(self) -> PatchFeatures:
        """Nobody's secret."""
        generator = torch.Generator().manual_seed(0)
        return PatchFeatures(self._public_images, self.FILTERS, generator).eval()

    @functools.cached_property
    def whitening(self) -> nn.Linear:
        return whitening_of(self.stored("public")["embeddings"], SHRINKAGE)

    def start(self, seed: int) -> ImageHead:
        """The head that a seed gives."""
        set_seed(seed)
        return ImageHead(self.features, self.whitening).eval()

    @torch.no_grad()
    def embed(self, name: str) -> dict[str, Tensor]:
        if name == "public":
            pixels = self._public_images
            labels = torch.zeros(len(pixels), dtype=torch.long)
        else:
            pixels, labels = getattr(self._images, f"{name}_rows")
        features, scale = self.features.to(DEVICE), 1 if pixels.is_floating_point() else 255
        embeddings = [
            features(pixel_chunk.to(DEVICE) / scale).cpu() for pixel_chunk in pixels.split(100)
        ]
        return {"embeddings": torch.cat(embeddings), "labels": labels}


class Images(Texts):
    """Accuracy on CIFAR-10 where nothing but a linear head is shared, each sample clipped, and what
    attackers recover at the start, in the middle and at the end of training.

    Conditions and figures: docs/findings/heads.md.
    """

    ARGUMENTS = clients.IMAGE_FLAGS | plan.FOLDER | {
        "--public": "npz with x_train: images that are nobody's secret, Tiny ImageNet"
    }  # fmt: skip
    ROWS, QUICK_ROW = plan.IMAGE_HEAD_ROWS, plan.QUICK_IMAGE_HEAD
    ATTACKS, QUICK_ATTACKS = plan.IMAGE_HEAD_ATTACKS, plan.QUICK_IMAGE_HEAD_ATTACKS
    GUESSED = "candidates"

    def cells(self) -> dict:
        attacks = self.QUICK_ATTACKS if self.quick else self.ATTACKS
        count, _, stages = attacks[plan.INVERTING]
        gray = {"attack": GRAY, "messages": count}
        places = {(GRAY, tables.place_of(plan.INVERTING, stage), "0"): gray for stage in stages}
        return super().cells() | places

    def embeddings(self, cell: Mapping) -> str:
        return "features"

    def load(self) -> None:
        args = self.args
        self.image_task = ImageHeadTask(args.train, args.test, args.models, args.public)

    def measure(self, cell: dict) -> dict:
        if "attack" in cell:
            return attack_images(cell, self.image_task, self.args.images)
        return self.image_task.trained(cell)
