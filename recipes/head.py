r"""Train a linear head on sentence embeddings that stay as they are, on SST-2, by differentially
private gradients: what a rank shares hides each of its sentences from everybody, by proof.

    accelerate launch recipes/head.py --public_text wikitext.txt

`--public_text` is any text that is nobody's secret, a sentence or a paragraph a line: no training
sentence, since its mean is saved. Embeddings are whitened by it, which gives back some of what the
noise costs. This is for messages of about 1,000 sentences. For messages of 16 see sst2.py --head.

Two ranks without GPUs: as in sst2.py. `--config FILE.yaml` holds flags; flags override
it.
"""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import PartialState
from datasets import DatasetDict
from torch import Tensor, nn
from transformers import AutoModel, set_seed
from transformers.utils import logging

from hf_gradguard import GradGuardTrainer
from hf_gradguard.data.samples import load_texts
from hf_gradguard.models import explain_missing_model, load_tokenizer
from hf_gradguard.train import accuracy_of, proof_of, report_run, train_and_save

# Started as a file, it finds no other recipe by itself.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from recipes import command_line
from recipes.command_line import flag

SHRINKAGE = 0.5
DP_SGD = {"per_sample": True, "clip": 1.0, "noise_multiplier": 2.0, "delta": 1e-5}


@dataclass
class RecipeArguments(command_line.TextArguments):
    public_text: str | None = flag(
        None, "File of public text, to whiten embeddings. Default: no whitening."
    )
    layers: int = flag(4, "How many of the last layers make an embedding.")


@dataclass
class Arguments(command_line.TrainingArguments):
    output_dir: str = flag("runs/head", "Where the head, its card and metrics.json go.")
    model_name_or_path: str | None = flag("sentence-transformers/all-MiniLM-L6-v2", "Any encoder.")
    defense: str = flag("dp_sgd", "The defense.")
    defense_kwargs: dict | str | None = flag(None, "Its settings.")  # noqa: RUF009
    per_device_train_batch_size: int = flag(1024, "Samples a rank and message, on average.")
    num_train_epochs: float = flag(24.0, "Passes over the data.")
    learning_rate: float = flag(2e-3, "Peak learning rate.")

    def __post_init__(self) -> None:
        if self.defense == "dp_sgd" and self.defense_kwargs is None:
            self.defense_kwargs = DP_SGD.copy()
        super().__post_init__()


class Encoder:
    """Means of the last layers' states, one layer after the other."""

    def __init__(self, name: str, layers: int, max_length: int, device: torch.device) -> None:
        with explain_missing_model(name):
            self.tokenizer = load_tokenizer(name)
            self.model = AutoModel.from_pretrained(name, trust_remote_code=False).eval().to(device)
        self._layers, self._max_length = layers, max_length
        count = self.model.config.num_hidden_layers + 1
        if not 1 <= layers <= count:
            sys.exit(
                f"--layers is {layers}, but {name} has {count} layers, its token embeddings "
                f"included. Take 1 to {count}."
            )

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Tensor:
        """`(N, layers · width)`."""
        inputs = self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=self._max_length,
            return_tensors="pt",
        ).to(self.model.device)  # fmt: skip
        states = self.model(**inputs, output_hidden_states=True).hidden_states
        return mean_of_layers(states, self._layers, inputs["attention_mask"]).cpu()


def mean_of_layers(states: Sequence[Tensor], layers: int, attention_mask: Tensor) -> Tensor:
    """`(N, layers · width)`, of states `(N, T, width)`: means over attended positions."""
    concatenated = torch.cat(states[-layers:], -1)
    attended = attention_mask[..., None].to(concatenated)
    return (concatenated * attended).sum(1) / attended.sum(1)


class Head(nn.Module):
    """What is trained is `head` alone."""

    def __init__(self, width: int, classes: int, whitening: nn.Module) -> None:
        super().__init__()
        self.whitening = whitening.requires_grad_(False)
        self.head = nn.Linear(width, classes)

    def forward(self, embeddings: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        output = {"logits": self.head(self.whitening(embeddings))}
        if labels is not None:
            output["loss"] = nn.functional.cross_entropy(output["logits"], labels)
        return output


def whitening_of(rows: Tensor, shrinkage: float) -> nn.Linear:
    """The map under which such rows `(N, width)` have mean 0 and, but for the shrinkage of their
    covariance to a multiple of one, covariance 1. (Shrinkage: Ledoit and Wolf, 2004, section 2; by
    a given share.)
    """
    mean, covariance = rows.double().mean(0), torch.cov(rows.double().T)
    values, vectors = torch.linalg.eigh(covariance)
    values = (1 - shrinkage) * values + shrinkage * values.mean()
    matrix = (vectors / values.sqrt()) @ vectors.T
    linear = nn.Linear(*matrix.shape)
    linear.load_state_dict({"weight": matrix.float(), "bias": (-matrix @ mean).float()})
    return linear


def main() -> None:
    recipe, args = command_line.parse_arguments(RecipeArguments, Arguments)
    state = PartialState(cpu=args.use_cpu)
    encoder = Encoder(args.model_name_or_path, recipe.layers, recipe.max_length, state.device)

    # Each sentence is embedded once, and not before all is well.
    data, column = command_line.load_classes(recipe.source, "text", recipe, args.seed, state)
    public = None
    if recipe.public_text is not None:
        public = public_texts(recipe.public_text, data["train"][column])
    card = {"tasks": "text-classification"}
    card["dataset"] = os.path.basename(recipe.data_dir or "SST-2")
    data = embedded(data, column, encoder, state)
    whitening = whitening_by(public, encoder, "public text")
    train(args, data, plain_head(data, whitening, args.seed), "eval_sentences", **card)


def embedded(
    data: DatasetDict, column: str, encoder: Callable[[Any], Tensor], state: PartialState,
    name: str = "embeddings",
) -> DatasetDict:  # fmt: skip
    """Rows with `embeddings` of a column in its place, under that name."""
    two_samples = data["train"][:2][column]
    embeddings, repeated = encoder(two_samples), encoder(two_samples)
    if (repeated - embeddings).norm() > 1e-2 * embeddings.norm():
        sys.exit(
            "The encoder gives the same rows other embeddings each time, as one that masks at "
            "random does (ViT-MAE). A head learns little from these. Take another encoder."
        )

    def embed(rows: dict) -> dict:
        return {name: encoder(rows[column]).numpy()}

    with state.main_process_first():
        return data.map(embed, batched=True, batch_size=64, remove_columns=[column])


def whitening_by(
    public: Sequence | None, encoder: Callable[[Any], Tensor], description: str
) -> nn.Module:
    """The map that whitens embeddings of what is nobody's secret, if there is any."""
    if public is None:
        return nn.Identity()
    starts = logging.tqdm(range(0, len(public), 64), desc=description)
    rows = torch.cat([encoder(public[start : start + 64]) for start in starts])
    return whitening_of(rows, SHRINKAGE)


def class_count(data: DatasetDict) -> int:
    return len(data["train"].features["labels"].names)


def plain_head(data: DatasetDict, whitening: nn.Module, seed: int) -> Head:
    """The head that a seed gives, behind a map that is no secret."""
    set_seed(seed)
    return Head(len(data["train"][0]["embeddings"]), class_count(data), whitening)


def train(args: Arguments, data: DatasetDict, head: nn.Module, counted: str, **card: str) -> None:
    """Train a head on its features and `labels`, and save it, its card and its metrics."""
    data = data.with_format("torch")
    classes = data["train"].features["labels"].names

    # Training: the stock Trainer's arguments, and a defense.
    trainer = GradGuardTrainer(
        model=head,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        compute_metrics=accuracy_of,
    )
    card["finetuned_from"] = args.model_name_or_path
    metrics = train_and_save(trainer, card)
    proved, claim = proof_of(trainer)
    report_run(trainer, metrics, counted, claim, classes=classes, **proved)


def public_texts(path: str, secret: Iterable[str]) -> list[str]:
    """What a file holds, where that is enough and not mostly the secret sentences."""
    if not os.path.isfile(path):
        sys.exit(f"--public_text {path} is no file.")
    try:
        texts = [text.strip() for text in load_texts(path) if text.strip()]
    except ValueError:
        texts = []  # said below, with what could be read
    if len(set(texts)) < 2:
        sys.exit(
            f"--public_text {path} gives {len(set(texts))} different text(s), and whitening takes "
            "two or more, better thousands. Name a .txt file in UTF-8, with a text a line, or a "
            ".csv, .tsv, .json, .jsonl or .parquet file with a column text, sentence or content."
        )
    description = f"texts of --public_text {path} are training sentences"
    check_public(list(map(_bare, texts)), map(_bare, secret), description)
    return texts


def check_public(public: Sequence[str], secret: Iterable[str], description: str) -> None:
    """Refuse what is mostly secret, and warn of what is so in part."""
    secrets = set(secret)
    same = sum(sample in secrets for sample in public)
    description = f"{same} of the {len(public)} {description} too"
    if 2 * same > len(public):
        sys.exit(
            f"{description}: it is not public, and its mean is saved with the head. Take another."
        )
    if same:  # leaving them out would tell which ones they are
        logger = logging.get_logger("recipes")
        logger.warning(f"{description}. Check that it is public all the same.")


def _bare(text: str) -> str:
    return " ".join(text.casefold().split())


if __name__ == "__main__":
    command_line.run(main)
