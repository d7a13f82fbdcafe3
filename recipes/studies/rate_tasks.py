"""Tasks on which default learning rates of heads are chosen and checked: features that are made
once and kept, rows to learn, rows that are held out, and rows to judge on.
"""

import functools
import random
import re
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel

from hf_gradguard.heads import PrivateHead, private_head

from .correlated_heads import HeadTask, ImagesTask
from .efficientnet_features import standardized_means
from .lib.device import DEVICE
from .lib.images import images_at
from .lib.linear_heads import held_out_sentences
from .lib.text import load_tokenizer

Article = list[list[str]]  # sentences by paragraph
TAB = "\t"  # between the texts of a pair


def articles_of(path: str | Path, longest: int = 30) -> list[Article]:
    """Return the articles of WikiText, each as paragraphs of sentences of 4 words or more."""
    articles: list[Article] = []
    for line in Path(path).read_text(encoding="utf-8").split("\n"):
        line = line.strip()
        if re.fullmatch(r"= [^=].*[^=] =", line):
            articles.append([])
        elif line and line[0] != "=" and articles:
            sentences = re.split(r"(?<= [.!?]) ", line)
            articles[-1].append([s for s in sentences if 4 <= len(s.split()) <= longest])
    return articles


class HalfTask(HeadTask):
    """Features by an encoder in bfloat16, three times as fast, and of fewer public sentences."""

    PUBLIC = 2000
    layers: int | None = None  # of the encoder, if not all

    @functools.cached_property
    def full_head(self) -> PrivateHead:
        fewer = {} if self.layers is None else {"num_hidden_layers": self.layers}
        encoder = AutoModel.from_pretrained(
            self._name, trust_remote_code=False, dtype=torch.bfloat16, **fewer
        ).to(DEVICE)
        public, _ = self.sentences("public")
        return private_head(
            encoder, public, 2, directions=self.DIRECTIONS, processing_class=self.tokenizer(),
            max_length=self.LENGTH,
        )  # fmt: skip

    def with_layers(self, count: int) -> Self:
        """The same by the first layers alone."""
        self.layers, self.folder = count, self.folder.with_name(f"{self.folder.name}-{count}")
        return self

    def tokenizer(self) -> Any:
        """Make the encoder's inputs of texts."""
        return load_tokenizer(self._name)


class RateTask(HalfTask):
    """Sentences of WikiText, which public ones of other articles make directions of.

    Args:
        model: An encoder's folder.
        wikitext: The folder of `train.txt`, whose rows are private, and `valid.txt`, which is
            public.
        folder: Keeps features.
    """

    HELD_OUT, TEST_ROWS = 2000, 2500

    def __init__(self, model: str, wikitext: str, folder: str) -> None:
        super().__init__(model, "", folder, "")
        self.folder = Path(folder) / f"rate-{type(self).__name__.lower()}-{Path(model).name}"
        self._wikitext = Path(wikitext)

    @functools.cached_property
    def all_rows(self) -> tuple[list, Tensor]:
        """Texts and labels in random order: rows to judge on come first."""
        texts, labels = self.private_rows()
        order = list(range(len(texts)))
        random.Random(0).shuffle(order)
        return [texts[row] for row in order], torch.tensor([labels[row] for row in order])

    def private_rows(self) -> tuple[list, list[int]]:
        """Texts and labels."""
        raise NotImplementedError

    def public_rows(self) -> list:
        """Texts that directions are made of."""
        raise NotImplementedError

    def sentences(self, name: str) -> tuple[list, Tensor]:
        if name == "public":
            texts = self.public_rows()
            random.Random(0).shuffle(texts)
            return texts[: self.PUBLIC], torch.zeros(min(len(texts), self.PUBLIC)).long()
        texts, labels = self.all_rows
        chosen = slice(self.TEST_ROWS) if name == "test" else slice(self.TEST_ROWS, None)
        return texts[chosen], labels[chosen]

    def places(self) -> tuple[list[int], list[int]]:
        rows = list(range(len(self.train_rows["labels"])))
        return rows[: self.HELD_OUT], rows[self.HELD_OUT :]


class Articles(RateTask):
    """Which of 200 articles a sentence is from: those with the most sentences."""

    CLASSES, ROWS = 200, 21000

    def private_rows(self) -> tuple[list, list[int]]:
        texts = [list(chain(*article)) for article in articles_of(self._wikitext / "train.txt")]
        longest = sorted(texts, key=len, reverse=True)[: self.CLASSES]
        pairs = [(text, label) for label, texts in enumerate(longest) for text in texts]
        random.Random(1).shuffle(pairs)
        return [text for text, _ in pairs[: self.ROWS]], [label for _, label in pairs[: self.ROWS]]

    def public_rows(self) -> list:
        articles = articles_of(self._wikitext / "valid.txt")
        return [text for article in articles for text in chain(*article)]


class TogetherTokenizer:
    """Both texts of a pair as one input, whose tokens attend to each other.

    Args:
        name: The encoder's.
    """

    def __init__(self, name: str) -> None:
        self._tokenizer = load_tokenizer(name)
        self.model_max_length: int = self._tokenizer.model_max_length

    def __call__(self, pairs: list[str], **settings: Any) -> Any:
        first, second = zip(*(pair.split(TAB) for pair in pairs), strict=True)
        return self._tokenizer(list(first), list(second), **settings)


class Pairs(RateTask):
    """Whether two sentences are neighbors in a paragraph, or the second is of another article.

    Each sentence is in one pair.
    """

    LENGTH, LONGEST, ROWS = 128, 30, 17500

    def private_rows(self) -> tuple[list, list[int]]:
        texts, labels = self._pairs("train")
        return texts[: self.ROWS], labels[: self.ROWS]

    def public_rows(self) -> list:
        return self._pairs("valid")[0]

    def sentences(self, name: str) -> tuple[list, Tensor]:
        pairs, labels = super().sentences(name)
        return [TAB.join(pair) for pair in pairs], labels

    def tokenizer(self) -> Any:
        return TogetherTokenizer(self._name)

    def _pairs(self, name: str) -> tuple[list, list[int]]:
        articles = articles_of(self._wikitext / f"{name}.txt", self.LONGEST)
        paragraphs = [paragraph for article in articles for paragraph in article]
        pairs = [pair for text in paragraphs for pair in zip(text[::2], text[1::2], strict=False)]
        random.Random(1).shuffle(pairs)
        half = len(pairs) // 2
        seconds = [second for _, second in pairs[:half]]
        moved = seconds[1:] + seconds[:1]  # pairs are in random order
        apart = [(first, second) for (first, _), second in zip(pairs, moved, strict=False)]
        mixed = [*((pair, 0) for pair in apart), *((pair, 1) for pair in pairs[half:])]
        random.Random(2).shuffle(mixed)
        return [pair for pair, _ in mixed], [label for _, label in mixed]


class SomePhrases(HalfTask):
    """SST-2: a part of the phrases, none of them of what is held out."""

    HELD_OUT, ROWS = 1500, 26000

    def __init__(self, model: str, data_dir: str, folder: str, public: str) -> None:
        super().__init__(model, data_dir, folder, public)
        self.folder = Path(folder) / f"rate-sst2-{Path(model).name}"

    @functools.cached_property
    def _chosen(self) -> tuple[list[str], Tensor, int]:
        """Texts, labels, and how many of them, which come first, are held out."""
        texts, labels = super().sentences("train")
        held_out, learned = held_out_sentences(texts, self.HELD_OUT)
        random.Random(1).shuffle(learned)
        rows = [*held_out, *learned[: self.ROWS]]
        return [texts[row] for row in rows], labels[torch.tensor(rows)], len(held_out)

    def sentences(self, name: str) -> tuple[list[str], Tensor]:
        return self._chosen[:2] if name == "train" else super().sentences(name)

    def places(self) -> tuple[list[int], list[int]]:
        count = self._chosen[2]
        return list(range(count)), list(range(count, len(self.train_rows["labels"])))


class RateImages(ImagesTask):
    """A part of the images of other data, too, by features of patches of public images.

    Args:
        name: The data's, of the folder that keeps features.
        files: A parquet file or an npz of images to train on, and one to judge on.
        public: An npz of public images.
        folder: Keeps features.
        rows: How many images to train on are taken, and how many to judge on.
        judged: The split's name in the second file.
    """

    CHUNK = 250

    def __init__(
        self, name: str, files: tuple[str, str], public: str, folder: str, rows: tuple[int, int],
        judged: str = "test",
    ) -> None:  # fmt: skip
        super().__init__(*files, folder, public)
        self.folder = Path(folder) / f"rate-{name}-patches"
        self._rows = dict(zip(("train", "test"), rows, strict=True))
        self._splits = {"train": "train", "test": judged}

    @functools.cached_property
    def public(self) -> Tensor:
        """Public images, in gray where the private ones are."""
        public = super().public
        return public.mean(1, keepdim=True).expand(-1, 3, -1, -1) if self.is_gray else public

    @functools.cached_property
    def is_gray(self) -> bool:
        return self._files["test"].endswith("mnist.npz")

    def made(self, name: str) -> dict[str, Tensor]:
        pixels, labels = images_at(self._files[name], self._splits[name])
        chosen = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(1))
        chosen = chosen[: self._rows[name]]
        parts = pixels[chosen].split(self.CHUNK)
        features = [self.full_head.features_of(scaled(part)) for part in parts]
        return {"features": torch.cat(features), "labels": labels[chosen]}


class Pixels(RateImages):
    """The same by the pixels themselves."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.folder = self.folder.with_name(self.folder.name.replace("patches", "pixels"))

    def encoder(self) -> nn.Module:
        return nn.Flatten()


class BlockMeans(RateImages):
    """The same by the blocks of EfficientNet-Lite0.

    Args:
        network: The folder of its packages.
        *args: As of `RateImages`.
    """

    PUBLIC, DIRECTIONS, CHUNK = 2000, 1400, 64

    def __init__(self, network: str, *args: Any) -> None:
        super().__init__(*args)
        self.folder = self.folder.with_name(self.folder.name.replace("patches", "efficientnet"))
        self._network = network

    def encoder(self) -> nn.Module:
        return standardized_means(self._network, self.public.to(DEVICE))


def scaled(pixels: Tensor) -> Tensor:
    """Return images `(N, 3, 32, 32)` in [0, 1], of gray ones of 28 pixels, too."""
    pixels = pixels.float() / 255
    if pixels.shape[1] == 1:
        pixels = F.pad(pixels, (2, 2, 2, 2)).expand(-1, 3, -1, -1)
    return pixels
