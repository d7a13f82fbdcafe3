r"""Train an image classifier so that ranks share only protected gradients.

    accelerate launch recipes/image_classification.py --dataset uoft-cs/cifar10 \
        --defense optimal_noise
    accelerate launch recipes/image_classification.py --dataset ylecun/mnist \
        --from_scratch gradguard_leaky_convnet --num_clients 10 --clients_per_process 4 \
        --partition dirichlet --defense optimal_pruning
    accelerate launch --multi_gpu --num_processes 2 recipes/image_classification.py --num_ranks 2 \
        --dataset my/images --from_scratch resnet \
        --model_config '{"depths": [1, 1, 1, 1], "layer_type": "basic"}' --defense gaussian_noise

Two ranks without GPUs: add `--mixed_precision no --dynamo_backend no` before the script and
`--use_cpu` after it. (`--cpu --num_processes 2` silently starts one rank.) `--config FILE.yaml`
holds flags; flags override it.
"""

import json
import os
import sys
from dataclasses import dataclass
from typing import Any

from accelerate import PartialState
from datasets import ClassLabel, Dataset, DatasetDict, Image, load_dataset
from datasets.exceptions import DatasetsError
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    PretrainedConfig,
    ViTImageProcessor,
    set_seed,
)

from hf_gradguard import GradGuardTrainer
from hf_gradguard.models import explain_missing_model

# Started as a file, it finds no other recipe by itself.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from recipes import command_line
from recipes.command_line import flag
from recipes.small_networks import MODELS


@dataclass
class DataArguments:
    dataset: str = flag(
        "uoft-cs/cifar10", "Hub name (ylecun/mnist, ...), or a folder of folders, one per class."
    )
    dataset_config: str | None = flag(None, "For SVHN: cropped_digits.")
    image_column: str | None = flag(None, "Default: the only one that holds images.")
    label_column: str | None = flag(None, "Default: the only one that holds classes.")


@dataclass
class RecipeArguments(DataArguments):
    from_scratch: str | None = flag(
        None, f"Train from nothing: vit, resnet, convnext, {', '.join(MODELS)}, ..."
    )
    model_config: str = flag("{}", "For --from_scratch: its config, as JSON.")
    num_ranks: int | None = flag(None, "Stop unless exactly this many ranks were started.")


@dataclass
class Arguments(command_line.TrainingArguments):
    output_dir: str = flag("runs/images", "Where the model, its card and metrics.json go.")
    model_name_or_path: str | None = flag("google/vit-base-patch16-224", "Any classifier.")
    per_device_train_batch_size: int = flag(16, "Images a rank and step.")


def main() -> None:
    recipe, args = command_line.parse_arguments(RecipeArguments, Arguments)
    args.remove_unused_columns = False  # the model's are made of the others when a row is read
    state = PartialState(cpu=args.use_cpu)
    command_line.check_ranks(state, recipe.num_ranks)
    train, held_out, image_column = load_splits(recipe, args.seed, state)
    classes = train.features["labels"].names

    # Model: a pretrained one with a new head, or one from its configuration, for images in [-1, 1].
    set_seed(args.seed)
    numbers = {name: number for number, name in enumerate(classes)}
    labels = {"id2label": dict(enumerate(classes)), "label2id": numbers}
    if recipe.from_scratch:
        image = train[0][image_column]
        sizes = {"num_channels": 1 if image.mode == "L" else 3, "image_size": max(image.size)}
        sizes |= json.loads(recipe.model_config)
        config = AutoConfig.for_model(recipe.from_scratch, **sizes, **labels)
        model = AutoModelForImageClassification.from_config(config, trust_remote_code=False)
        gray = [0.5] * sizes["num_channels"]
        processor = ViTImageProcessor(size=sizes["image_size"], image_mean=gray, image_std=gray)
    else:
        name = args.model_name_or_path
        with explain_missing_model(name):
            processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
            model = AutoModelForImageClassification.from_pretrained(
                name, ignore_mismatched_sizes=True, **labels, trust_remote_code=False
            )
    mode = mode_of(model.config)

    def to_pixels(rows: dict[str, list]) -> dict[str, Any]:
        pixels = processor(
            [image.convert(mode) for image in rows[image_column]], return_tensors="pt"
        )["pixel_values"]
        return {"pixel_values": list(pixels), "labels": rows["labels"]}

    # Training: the stock Trainer's arguments, and a defense.
    trainer = GradGuardTrainer(
        model=model,
        args=args,
        train_dataset=train.with_transform(to_pixels),
        eval_dataset=held_out.with_transform(to_pixels),
        processing_class=processor,
        compute_metrics=command_line.accuracy_of,
    )
    dataset = os.path.basename(recipe.dataset.rstrip("/"))
    metrics = command_line.train_and_save(
        trainer, {"tasks": "image-classification", "dataset": dataset}
    )
    command_line.report_run(trainer, metrics, "eval_images")


def load_splits(
    recipe: DataArguments, seed: int, state: PartialState
) -> tuple[Dataset, Dataset, str]:
    """Images of the Hub, or of a folder, and their `labels`: to train on and to judge by; and the
    images' column. Without a validation or test split a tenth of the training images is held out.
    """
    with state.main_process_first():
        try:
            splits = load_dataset(recipe.dataset, recipe.dataset_config)
        except (DatasetsError, FileNotFoundError, ConnectionError) as error:
            sys.exit(
                f"--dataset {recipe.dataset} gives no images ({str(error).rstrip('.')}). Name a "
                "folder of folders of images, one per class, or a data set on the Hub."
            )
    image_column = recipe.image_column or only_column(splits["train"], Image)
    label_column = recipe.label_column or only_column(splits["train"], ClassLabel)
    splits = splits.select_columns([image_column, label_column]).rename_columns(
        {label_column: "labels"}
    )
    judged = "validation" if "validation" in splits else "test"
    used = {name: splits[name] for name in ("train", judged) if name in splits}
    splits = command_line.with_classes(DatasetDict(used), "labels")
    if judged not in splits:
        with state.main_process_first():
            splits = splits["train"].train_test_split(0.1, seed=seed)
    return splits["train"], splits[judged], image_column


def mode_of(config: PretrainedConfig) -> str:
    """Of the images that a model takes."""
    return "L" if getattr(config, "num_channels", 3) == 1 else "RGB"


def only_column(data: Dataset, kind: type) -> str:
    columns = [name for name, feature in data.features.items() if isinstance(feature, kind)]
    if kind is ClassLabel and len(data.column_names) == 1:
        sys.exit(
            "There are images alone, without classes. A folder needs two folders of images or "
            "more, one per class and all equally deep, or a metadata.csv with a column of labels."
        )
    if len(columns) != 1:
        flag = "--image_column" if kind is Image else "--label_column"
        sys.exit(
            f"{len(columns)} columns are of type {kind.__name__}: {columns} of "
            f"{data.column_names}. Choose with {flag}."
        )
    return columns[0]


if __name__ == "__main__":
    main()
