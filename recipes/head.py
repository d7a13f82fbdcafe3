r"""Train a linear head on sentence embeddings that stay as they are, on SST-2, by differentially
private gradients: what a rank shares hides each of its sentences from everybody, by proof.

    accelerate launch recipes/head.py --public_text wikitext.txt

`--public_text` is any text that is nobody's secret, a sentence or a paragraph a line. Embeddings
are whitened by it, which gives back some of what the noise costs. Two ranks without GPUs: as in
sst2.py. `--config FILE.yaml` holds flags; flags override it.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from accelerate import PartialState
from datasets import load_dataset
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, set_seed
from transformers.utils import logging

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.leakage import membership_power
from hf_gradguard.training.command_line import parse_arguments, write_metrics

SHRINKAGE = 0.5
DP_SGD = {"per_sample": True, "clip": 1.0, "noise_multiplier": 2.0, "delta": 1e-5}


@dataclass
class RecipeArguments:
    data_dir: str | None = field(
        default=None,
        metadata={"help": "Folder with train.tsv and dev.tsv. Default: GLUE, from the Hub."},
    )
    public_text: str | None = field(
        default=None, metadata={"help": "Text by which embeddings are whitened. Default: not."}
    )
    layers: int = field(default=4, metadata={"help": "Of so many last layers are embeddings."})
    max_length: int = field(
        default=64, metadata={"help": "Tokens a sentence; longer ones are cut."}
    )


@dataclass
class Arguments(GradGuardConfig):
    output_dir: str = field(
        default="runs/head", metadata={"help": "Where the head, its card and metrics.json go."}
    )
    model_name_or_path: str | None = field(
        default="sentence-transformers/all-MiniLM-L6-v2", metadata={"help": "Any encoder."}
    )
    defense: str = field(default="dp_sgd", metadata={"help": "The defense."})
    defense_kwargs: dict | str | None = field(
        default_factory=DP_SGD.copy, metadata={"help": "Its settings."}
    )
    per_device_train_batch_size: int = field(
        default=1024, metadata={"help": "Sentences a rank and message, on average."}
    )
    num_train_epochs: float = field(default=24.0, metadata={"help": "Passes over the data."})
    learning_rate: float = field(default=2e-3, metadata={"help": "Peak learning rate."})
    save_strategy: str = field(
        default="no", metadata={"help": "Checkpoints on the way: no, steps or epoch."}
    )


class Encoder:
    """Means of the last layers' states, one layer after the other."""

    def __init__(self, name: str, layers: int, max_length: int, device: torch.device) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        self.model = AutoModel.from_pretrained(name, trust_remote_code=False).eval().to(device)
        self._layers, self._max_length = layers, max_length

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Tensor:
        """`(N, layers · width)`."""
        inputs = self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=self._max_length,
            return_tensors="pt",
        ).to(self.model.device)  # fmt: skip
        states = self.model(**inputs, output_hidden_states=True).hidden_states
        heard = inputs["attention_mask"][..., None]
        together = torch.cat(states[-self._layers :], -1)
        return ((together * heard).sum(1) / heard.sum(1)).cpu()


class Head(nn.Module):
    """What is trained is `head` alone."""

    def __init__(self, width: int, classes: int, whitening: nn.Module) -> None:
        super().__init__()
        self.whitening = whitening.requires_grad_(False)
        self.head = nn.Linear(width, classes)

    def forward(self, embeddings: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        found = {"logits": self.head(self.whitening(embeddings))}
        if labels is not None:
            found["loss"] = nn.functional.cross_entropy(found["logits"], labels)
        return found


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
    recipe, args = parse_arguments(RecipeArguments, Arguments)
    state = PartialState(cpu=args.use_cpu)
    encoder = Encoder(args.model_name_or_path, recipe.layers, recipe.max_length, state.device)

    # Data: the Hub's GLUE, or a folder. Each sentence is embedded once.
    def embedded(rows: dict) -> dict:
        return {"embeddings": encoder(rows["sentence"]).numpy()}

    with state.main_process_first():
        if recipe.data_dir is None:
            data = load_dataset("nyu-mll/glue", "sst2")
        else:
            files = {
                s: f"{recipe.data_dir}/{n}.tsv"
                for s, n in (("train", "train"), ("validation", "dev"))
            }
            data = load_dataset("csv", data_files=files, delimiter="\t", quoting=3)
        data = data.map(embedded, batched=True, batch_size=64, remove_columns=["sentence"])
    classes = max(data["train"]["label"]) + 1
    data = data.with_format("torch", columns=["embeddings", "label"])

    # Model: the head, behind a map that is no secret.
    whitening: nn.Module = nn.Identity()
    if recipe.public_text is not None:
        whitening = whitening_of(public(encoder, recipe.public_text), SHRINKAGE)
    set_seed(args.seed)
    head = Head(recipe.layers * encoder.model.config.hidden_size, classes, whitening)

    # Training: the stock Trainer's arguments, and a defense.
    trainer = GradGuardTrainer(
        model=head,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        compute_metrics=lambda p: {
            "accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())
        },
    )
    trained = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    metrics = {**trained.metrics, **trainer.evaluate()}

    trainer.save_model()
    trainer.create_model_card(
        finetuned_from=args.model_name_or_path,
        tasks="text-classification",
        dataset=os.path.basename(recipe.data_dir or "SST-2"),
    )
    if trainer.is_world_process_zero():
        proved, said = private(trainer)
        report, path = write_metrics(trainer, metrics, "eval_sentences", **proved)
        print(f"{report['defense']}: accuracy {report['accuracy']:.3f}{said} -> {path}")
    trainer.accelerator.end_training()


def public(encoder: Encoder, path: str) -> Tensor:
    """Its embeddings, `(N, layers · width)`."""
    with open(path, encoding="utf-8") as file:
        lines = [line.strip() for line in file if line.strip()]
    starts = logging.tqdm(range(0, len(lines), 64), desc="public text")
    return torch.cat([encoder(lines[start : start + 64]) for start in starts])


def private(trainer: GradGuardTrainer) -> tuple[dict[str, float | None], str]:
    """What is proved of this training, for its metrics and in words."""
    rows = trainer.private_rows
    if rows is None:
        return {}, ""
    power = membership_power(rows.noise_multiplier)
    of = "the ranks' summed messages" if trainer.args.noise_for == "sum" else "a message"
    said = "" if rows.epsilon is None else f", ε = {rows.epsilon:.2g}"
    said += f"; of {of} nobody tells more than {power:.1%} of the rows at 1 % false alarms"
    return {"epsilon": rows.epsilon, "told_of_a_message": power}, said


if __name__ == "__main__":
    main()
