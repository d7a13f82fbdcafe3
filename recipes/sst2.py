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
from collections.abc import Iterable
from dataclasses import dataclass

from accelerate import PartialState
from tokenizers import BertWordPieceTokenizer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    set_seed,
)

from hf_gradguard import GradGuardTrainer
from hf_gradguard.models import classifier_head, load_model

# Started as a file, it finds no other recipe by itself.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from recipes import command_line
from recipes.command_line import flag

SMALL_BERT = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256,
    # Withheld embeddings stay as random as they start: a wider start tells tokens apart better.
    "initializer_range": 0.05,
}  # fmt: skip


@dataclass
class RecipeArguments(command_line.TextArguments):
    from_scratch: bool = flag(False, "Train a small BERT and its tokenizer from nothing.")
    num_ranks: int | None = flag(None, "Stop unless exactly this many ranks were started.")


@dataclass
class Arguments(command_line.TrainingArguments):
    output_dir: str = flag("runs/sst2", "Where the model, its card and metrics.json go.")
    model_name_or_path: str | None = flag("google-bert/bert-base-uncased", "Any encoder.")
    per_device_train_batch_size: int = flag(16, "Sentences a rank and message.")
    learning_rate: float = flag(2e-5, "Peak learning rate.")


def main() -> None:
    recipe, args = command_line.parse_arguments(RecipeArguments, Arguments)
    state = PartialState(cpu=args.use_cpu)
    command_line.check_ranks(state, recipe.num_ranks)
    if recipe.from_scratch and (args.defense_kwargs or {}).get("per_sample"):
        sys.exit(
            "--from_scratch learns its vocabulary from the training sentences and saves it: words "
            "of single ones too, which no ε of dp_sgd with per_sample covers. Leave it out, and "
            "name a model whose tokenizer comes from other text as --model_name_or_path."
        )
    data, column = command_line.load_classes(recipe.source, "text", recipe, args.seed, state)
    head = classifier_head(data["train"].features["labels"].names)

    # Model: any encoder, or a small one of our own. Its tokenizer is trained by rank 0 and read by
    # the others.
    set_seed(args.seed)
    if recipe.from_scratch:
        folder = os.path.join(args.output_dir, "tokenizer")
        with state.main_process_first():
            if state.is_main_process:
                train_tokenizer(data["train"][column], folder)
            tokenizer = BertTokenizerFast.from_pretrained(folder, trust_remote_code=False)
        sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": recipe.max_length}
        model = BertForSequenceClassification(BertConfig(**SMALL_BERT, **sizes, **head))
    else:
        model, tokenizer = load_model(args.model_name_or_path, "text-classification", head)

    def tokenize(rows: dict) -> dict:
        return tokenizer(rows[column], truncation=True, max_length=recipe.max_length)

    with state.main_process_first():
        data = data.map(tokenize, batched=True, remove_columns=[column])

    # Training: the stock Trainer's arguments, and a defense.
    trainer = GradGuardTrainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        compute_metrics=command_line.accuracy_of,
    )
    dataset = os.path.basename(recipe.data_dir or "SST-2")
    card = {"tasks": "text-classification", "dataset": dataset}
    command_line.report_run(trainer, command_line.train_and_save(trainer, card), "eval_sentences")


def train_tokenizer(texts: Iterable[str], folder: str) -> None:
    trained = BertWordPieceTokenizer()
    trained.train_from_iterator(texts, vocab_size=2000, min_frequency=2, show_progress=False)
    BertTokenizerFast(tokenizer_object=trained._tokenizer).save_pretrained(folder)


if __name__ == "__main__":
    command_line.run(main)
