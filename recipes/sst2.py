r"""Fine-tune a text classifier on SST-2 so that ranks share only protected gradients.

    accelerate launch recipes/sst2.py --defense optimal_noise
    accelerate launch --multi_gpu --num_processes 2 recipes/sst2.py --num_ranks 2 \
        --defense optimal_pruning --defense_kwargs '{"ratio": 0.9}' \
        --model_name_or_path FacebookAI/roberta-base

Two ranks without GPUs: add `--mixed_precision no --dynamo_backend no` before the script and
`--use_cpu` after it. (`--cpu --num_processes 2` silently starts one rank.) `--config FILE.yaml`
holds flags; flags override it.
"""

import os
import sys
from dataclasses import dataclass, field

from accelerate import PartialState
from datasets import DatasetDict, load_dataset
from tokenizers import BertWordPieceTokenizer
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    set_seed,
)

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.models import explain_missing_model

# Started as a file, it finds no other recipe by itself.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from recipes.command_line import parse_arguments, write_metrics


@dataclass
class RecipeArguments:
    data_dir: str | None = field(
        default=None,
        metadata={"help": "Folder with train.tsv and dev.tsv. Default: GLUE, from the Hub."},
    )
    max_length: int = field(
        default=64, metadata={"help": "Tokens a sentence; longer ones are cut."}
    )
    from_scratch: bool = field(
        default=False, metadata={"help": "Train a small BERT and its tokenizer from nothing."}
    )
    num_ranks: int | None = field(
        default=None, metadata={"help": "Stop unless exactly this many ranks were started."}
    )


@dataclass
class Arguments(GradGuardConfig):
    output_dir: str = field(
        default="runs/sst2", metadata={"help": "Where the model, its card and metrics.json go."}
    )
    model_name_or_path: str | None = field(
        default="google-bert/bert-base-uncased", metadata={"help": "Any encoder."}
    )
    per_device_train_batch_size: int = field(
        default=16, metadata={"help": "Sentences a rank and message."}
    )
    num_train_epochs: float = field(default=1.0, metadata={"help": "Passes over the data."})
    learning_rate: float = field(default=2e-5, metadata={"help": "Peak learning rate."})
    save_strategy: str = field(
        default="no", metadata={"help": "Checkpoints on the way: no, steps or epoch."}
    )


def main() -> None:
    recipe, args = parse_arguments(RecipeArguments, Arguments)
    state = PartialState(cpu=args.use_cpu)
    state.print(f"ranks: {state.num_processes}")
    if recipe.num_ranks is not None and state.num_processes != recipe.num_ranks:
        sys.exit(
            f"{recipe.num_ranks} ranks were asked for, but {state.num_processes} started. See the "
            "head of this file."
        )
    if recipe.from_scratch and (args.defense_kwargs or {}).get("per_sample"):
        sys.exit(
            "--from_scratch learns its vocabulary from the training sentences and saves it: words "
            "of single ones too, which no ε of dp_sgd with per_sample covers. Leave it out, and "
            "name a model whose tokenizer comes from other text as --model_name_or_path."
        )

    # Data: the Hub's GLUE, or a folder.
    with state.main_process_first():
        if recipe.data_dir is None:
            data = load_dataset("nyu-mll/glue", "sst2")
        else:
            files = {
                s: f"{recipe.data_dir}/{n}.tsv"
                for s, n in (("train", "train"), ("validation", "dev"))
            }
            data = load_dataset("csv", data_files=files, delimiter="\t", quoting=3)

    # Model: any encoder, or a small one of our own. Its tokenizer is trained by rank 0 and read by
    # the others.
    set_seed(args.seed)
    if recipe.from_scratch:
        folder = os.path.join(args.output_dir, "tokenizer")
        with state.main_process_first():
            if state.is_main_process:
                train_tokenizer(data, folder)
            tokenizer = BertTokenizerFast.from_pretrained(folder, trust_remote_code=False)
        sizes = {
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 256,
        }
        sizes |= {"vocab_size": len(tokenizer), "max_position_embeddings": recipe.max_length}
        # Withheld embeddings stay as random as they start: a wider start tells tokens apart better.
        model = BertForSequenceClassification(BertConfig(**sizes, initializer_range=0.05))
    else:
        name = args.model_name_or_path
        with explain_missing_model(name):
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            model = AutoModelForSequenceClassification.from_pretrained(
                name, num_labels=2, trust_remote_code=False
            )

    def tokenize(rows: dict) -> dict:
        return tokenizer(rows["sentence"], truncation=True, max_length=recipe.max_length)

    with state.main_process_first():
        data = data.map(tokenize, batched=True, remove_columns=["sentence"])

    # Training: the stock Trainer's arguments, and a defense.
    trainer = GradGuardTrainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        compute_metrics=lambda p: {
            "accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())
        },
    )
    trained = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    metrics = {**trained.metrics, **trainer.evaluate()}

    trainer.save_model()
    trainer.create_model_card(
        tasks="text-classification", dataset=os.path.basename(recipe.data_dir or "SST-2")
    )
    if trainer.is_world_process_zero():
        report, path = write_metrics(trainer, metrics, "eval_sentences")
        print(
            f"{report['defense']}: accuracy {report['accuracy']:.3f}, "
            f"{report['seconds_per_step']:.2f} s a step -> {path}"
        )
    trainer.accelerator.end_training()


def train_tokenizer(data: DatasetDict, folder: str) -> None:
    trained = BertWordPieceTokenizer()
    trained.train_from_iterator(
        data["train"]["sentence"], vocab_size=2000, min_frequency=2, show_progress=False
    )
    BertTokenizerFast(tokenizer_object=trained._tokenizer).save_pretrained(folder)


if __name__ == "__main__":
    main()
