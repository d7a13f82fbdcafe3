"""What does `gradguard recommend` answer on data that its defaults were not chosen on, and does
`gradguard train` keep what it promised?
"""

import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F
from transformers import ResNetConfig, ResNetForImageClassification, ViTImageProcessor

from hf_gradguard.data.class_labels import find_class
from hf_gradguard.heads.head import PrivateHead
from hf_gradguard.models import load_model
from hf_gradguard.recommend.intervals import accuracy_over_seeds

from ..study import Study
from .lib.images import array_images
from .lib.results import Results
from .lib.tables import write_table
from .rate_tasks import articles_of

MINUTES, ROWS, OTHER_ROWS, PUBLIC = 15.0, 2000, 1000, 5000  # sentences or images
Labeled = list[tuple[str, Any]]
QUICK_ROWS = 160
QUICK = [
    "--steps", 4, "--batch_size", 8, "--attacked", 4, "--decoys", 0, "--seeds", 1, "--budget",
    0.99, "--defense", "pruning:ratio=0.9",
]  # fmt: skip
SECTIONS = ("Production", "Reception", "Plot", "Background", "Description")
RUN, AGAIN, WHOLE = "recommend", "the same command again", "whole model, undefended"
PASSES, RATE, IMAGE_RATE = 3, 2e-4, 1e-3  # of an undefended training, as one might choose them


class Files(NamedTuple):
    """What a run reads.

    Args:
        dataset: The data that are given to the command.
        public: What is nobody's secret.
        others: More samples and labels of the same kind, which the command never sees.
    """

    dataset: Path
    public: Path
    others: list[tuple[Any, Any]]


def sst2_phrases(args: Any, folder: Path) -> Files:
    """Phrases of reviews, and whether they are positive. The defaults were chosen on such."""
    lines = (Path(args.data_dir) / "train.tsv").read_text(encoding="utf-8").split("\n")[1:]
    rows = [(text.strip(), label) for text, _, label in (line.rpartition("\t") for line in lines)]
    return texts_in(folder, args, [(text, label) for text, label in rows if text])


def articles(args: Any, folder: Path) -> Files:
    """Sentences of WikiText-2, and which of ten articles, the longest, they are from."""
    texts = [list(chain(*article)) for article in articles_of(Path(args.wikitext) / "train.txt")]
    longest = sorted(texts, key=len, reverse=True)[:10]
    return texts_in(
        folder, args, [(s, f"a{n}") for n, article in enumerate(longest) for s in article]
    )


def sections(args: Any, folder: Path) -> Files:
    """Sentences of WikiText-2, and which of five sections of an article they are from."""
    rows, heading = Labeled(), ""
    for line in (Path(args.wikitext) / "train.txt").read_text(encoding="utf-8").split("\n"):
        line = line.strip()
        if line.startswith("="):
            found = re.fullmatch(r"= = ([^=].*[^=]) = =", line)
            # A subsection is a part of its section.
            heading = found[1] if found else "" if re.fullmatch(r"= [^=].*= *", line) else heading
        elif heading in SECTIONS:
            pieces = re.split(r"(?<= [.!?]) ", line)
            rows += [(piece, heading) for piece in pieces if 4 <= len(piece.split()) <= 30]
    random.Random(0).shuffle(rows)
    equal = [row for name in SECTIONS for row in [r for r in rows if r[1] == name][:700]]
    return texts_in(folder, args, equal)


def texts_in(folder: Path, args: Any, rows: Labeled) -> Files:
    """Write a table of the first rows in random order, and public sentences of other articles."""
    random.Random(0).shuffle(rows)
    table = folder / "rows.tsv"
    lines = [f"{text}\t{label}\n" for text, label in rows[: args.rows]]
    table.write_text("text\tlabel\n" + "".join(lines), encoding="utf-8")
    others = articles_of(Path(args.wikitext) / "valid.txt")
    public = [sentence for article in others for sentence in chain(*article)]
    random.Random(0).shuffle(public)
    (folder / "public.txt").write_text("\n".join(public[:PUBLIC]), encoding="utf-8")
    return Files(table, folder / "public.txt", rows[args.rows : args.rows + OTHER_ROWS])


def digits(args: Any, folder: Path) -> Files:
    """MNIST's images in three equal channels; public are gray images of Tiny ImageNet."""
    pixels, labels = array_images(args.mnist)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    order = order[: args.rows + OTHER_ROWS]
    images = F.pad(pixels[order], (2, 2, 2, 2)).expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
    names = labels[order].numpy()
    np.savez(folder / "rows.npz", image=images[: args.rows], label=names[: args.rows])
    public, _ = array_images(args.tiny_imagenet)
    gray = public.float().mean(1).byte()[..., None].expand(-1, -1, -1, 3)
    np.savez(folder / "public.npz", image=gray[:PUBLIC].numpy())
    others = list(zip(images[args.rows :], names[args.rows :], strict=True))
    return Files(folder / "rows.npz", folder / "public.npz", others)


DATA: dict[str, Callable[[Any, Path], Files]] = {
    "SST-2": sst2_phrases, "articles": articles, "sections": sections, "MNIST": digits
}  # fmt: skip


def image_encoder(args: Any, epochs: int = 6) -> str:
    """Return the folder of a small ResNet that was trained on Tiny ImageNet at 32 pixels."""
    folder = Path(args.models) / "resnet-tiny-imagenet"
    if (folder / "config.json").exists():
        return str(folder)
    torch.manual_seed(0)
    widths = {"embedding_size": 32, "hidden_sizes": [32, 64, 128], "depths": [1, 1, 1]}
    config = ResNetConfig(
        **widths, layer_type="basic", num_labels=200, downsample_in_first_stage=False
    )
    model = ResNetForImageClassification(config)
    pixels, labels = array_images(args.tiny_imagenet)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.05)
    steps = epochs * (len(labels) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    model.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels)).split(64)[: len(labels) // 64]:
            images = (pixels[chosen].float() / 255 - 0.5) / 0.5
            images = images.flip(-1) if torch.rand(()) < 0.5 else images
            model(images, labels=labels[chosen]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    model.eval().base_model.save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return str(folder)


class RecommendRuns(Study):
    """What does `gradguard recommend` answer within 15 minutes, on 2,000 rows? And does `gradguard
    train` with its file keep what it promised, on 1,000 rows that no command has seen? Beside it
    stands an undefended training of the whole model on all rows, three times. Where there was no
    time for a head, the same command is run again: it goes on.

    Conditions and figures: docs/findings/heads.md.
    """

    ARGUMENTS: ClassVar = Study.ALL | {
        "--model": "the text model that is to be trained, a folder",
        "--encoder": "another text encoder, a folder",
        "--data_dir": "folder of SST-2",
        "--wikitext": "folder of WikiText-2",
        "--mnist": "npz with x_train and y_train",
        "--tiny_imagenet": "npz with x_train, of 32 pixels",
        "--models": "folder that keeps the image encoder, and what runs wrote",
        "--only": {"nargs": "+", "choices": list(DATA), "help": "these data alone"},
    }
    COLUMNS: ClassVar = [
        "data", "row", "accuracy", "points lost", "trainings", "ε", "rows found", "told apart",
        "recommended", "accuracy on other rows",
    ]  # fmt: skip
    MINUTES_COLUMNS: ClassVar = [
        "data", "minutes", "of a processor", "not tried", "of them heads", "minutes of `train`"
    ]  # fmt: skip

    def cells(self) -> dict:
        names = self.args.only or list(DATA)
        rows = QUICK_ROWS if self.quick else ROWS
        settings: dict[str, dict] = {
            RUN: {"minutes": MINUTES}, AGAIN: {"minutes": MINUTES, "run": 2},
            WHOLE: {"defense": "none", "passes": PASSES},
        }  # fmt: skip
        cells: dict = {
            (name, part): {"data": name, "rows": rows} | own
            for part, own in settings.items()
            for name in names
        }
        results = Results(self.output)
        for name in names:  # only where the first run had no time for a head
            first = cells[name, RUN] | ({"quick": True} if self.quick else {})
            if first not in results or "head on" not in results[first]["limits"]:
                del cells[name, AGAIN]
        return cells if self.args.only else self.published(cells)

    def measure(self, cell: dict) -> dict:
        folder = Path(self.args.models) / f"recommend-{cell['data']}"
        folder.mkdir(parents=True, exist_ok=True)
        self.args.rows = cell["rows"]
        files, is_text = DATA[cell["data"]](self.args, folder), cell["data"] != "MNIST"
        model = self.args.model if is_text else image_encoder(self.args)
        flags = ["--model", model, "--dataset", files.dataset]
        if "passes" in cell:
            flags += ["--defense", "none", "--num_train_epochs", cell["passes"], "--use_cpu"]
            flags += [
                "--learning_rate",
                RATE if is_text else IMAGE_RATE,
                "--per_device_train_batch_size",
                16,
            ]
            return trained(flags, folder / "whole", files.others)
        flags += ["--encoder", self.args.encoder] if is_text else []
        flags += ["--public", files.public, "--budget_minutes", cell["minutes"]]
        flags += ["--output", folder / "found", *(QUICK if self.quick else [])]
        spent = run_command("recommend", flags)
        found = json.loads((folder / "found" / "recommend.json").read_text(encoding="utf-8"))
        words = without_places(found["words"], self.args)
        figures = {
            "first sentence": words.split("\n\n")[0],
            "words": words,
            "limits": without_places(found["limits"], self.args),
            "chosen": found["chosen"] and found["chosen"]["defense"],
            "untrained": found["untrained"]["mean"],
            "rows": {row["defense"]: facts_of(row) for row in found["outcomes"]},
            **spent,
        }  # fmt: skip
        if found["chosen"]:
            flags = ["--config", folder / "found" / "train.yaml", "--use_cpu"]
            figures["trained"] = trained(flags, folder / "found" / "model", files.others)
        return figures

    def report(self, metrics: dict) -> None:
        rows = []
        for name, parts in metrics.items():
            found, whole = parts.get(AGAIN, parts.get(RUN)), parts.get(WHOLE)
            for label, row in found["rows"].items() if found else ():
                is_whole, is_chosen = label == "none", label == found["chosen"]
                trained = whole if is_whole else found["trained"] if is_chosen else None
                rows.append([
                    name, WHOLE if is_whole else label, shown(row["accuracy"]),
                    "" if is_whole else shown(row["lost"]), str(len(row["trainings"])),
                    f"{row['epsilon']:.2g}" if "epsilon" in row else "no proof",
                    *(shown(row[key]) if key in row else "" for key in ("found", "told_apart")),
                    "yes" if is_chosen else "", shown(trained["accuracy"]) if trained else "",
                ])  # fmt: skip
        write_table(self.output, self.COLUMNS, rows)
        times = [
            [f"{name}, {part}" if part == AGAIN else name, f"{found['minutes']:.1f}",
             f"{found['processor minutes']:.1f}", str(not_tried(found["limits"])),
             str(found["limits"].count("head on")),
             f"{found['trained']['minutes']:.1f}" if "trained" in found else ""]
            for name, parts in metrics.items()
            for part, found in parts.items() if part != WHOLE
        ]  # fmt: skip
        output = self.output.with_name(f"{self.output.name}_minutes")
        write_table(output, self.MINUTES_COLUMNS, times)


def run_command(command: str, flags: Iterable[Any]) -> dict[str, float]:
    """Run a command on one thread, and return the minutes that it took."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "hf_gradguard", command, *map(str, flags)], check=True,
        env=environment,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "minutes": round((time.monotonic() - began) / 60, 2),
        "processor minutes": round(processor / 60, 2),
    }


def facts_of(row: dict) -> dict[str, Any]:
    """Return what a table shows of a row of recommend.json."""
    facts: dict[str, Any] = {name: ends_of(row[name]) for name in ("accuracy", "lost")}
    facts["trainings"] = [round(accuracy, 4) for accuracy in row["trainings"]]
    if row["proof"] is not None:
        facts |= {name: row["proof"][name] for name in ("epsilon", "noise_multiplier", "rows")}
        facts |= {name: ends_of(ends) for name, ends in (row["recognition"] or {}).items()}
    else:
        facts |= {"leak": ends_of(row["leak"]), "attack": row["attack"]}
    return facts


def ends_of(estimate: dict) -> list[float]:
    return [round(estimate[end], 4) for end in ("mean", "low", "high")]


def trained(
    flags: Sequence[Any], output: Path, others: Sequence[tuple[Any, Any]]
) -> dict[str, Any]:
    """Run `gradguard train`, and judge the model that it saves on rows that nobody saw."""
    spent = run_command("train", [*flags, "--output", output])
    held_out = json.loads((output / "metrics.json").read_text(encoding="utf-8"))["accuracy"]
    model, processing_class = load_model(str(output))
    classes: dict[str, int] = model.config.label2id
    labels = [find_class(str(label), classes) for _, label in others]
    predicted = predictions(model, processing_class, others)
    right = [float(found == label) for found, label in zip(predicted, labels, strict=True)]
    accuracy = accuracy_over_seeds([right])
    ends = [round(end, 4) for end in (accuracy.mean, accuracy.low, accuracy.high)]
    return {"accuracy": ends, "held out": round(held_out, 4), **spent}


@torch.no_grad()
def predictions(model: Any, processing_class: Any, samples: Sequence[tuple[Any, Any]]) -> list[int]:
    """Return the class that a saved model says of each sample."""
    found: list[int] = []
    for start in range(0, len(samples), 50):
        inputs = [sample for sample, _ in samples[start : start + 50]]
        if isinstance(model, PrivateHead):
            logits = model(features=model.features_of(inputs)).logits
        else:
            of_texts = {"padding": True, "truncation": True, "max_length": 64}
            settings = of_texts if isinstance(inputs[0], str) else {}
            logits = model(**processing_class(inputs, return_tensors="pt", **settings)).logits
        found += logits.argmax(-1).tolist()
    return found


def without_places(words: str, args: Any) -> str:
    """Return words without the folders of this machine."""
    for path in (args.model, args.encoder, args.models):
        if path:
            words = words.replace(str(path), Path(path).name)
    return words


def not_tried(limits: str) -> int:
    """Return how many defenses there was no time for."""
    listed = re.search(r"\(--budget_minutes\): (.*?)\. ", f"{limits} ")
    return len(re.split(r", (?=[a-z])", listed[1])) if listed else 0


def shown(ends: Sequence[float]) -> str:
    mean, low, high = (f"{100 * end:.1f}" for end in ends)
    return f"{mean} [{low}, {high}]"
