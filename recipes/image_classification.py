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
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    PretrainedConfig,
    ViTImageProcessor,
    set_seed,
)

from hf_gradguard import GradGuardTrainer
from hf_gradguard.data.images import read_image, to_pil
from hf_gradguard.models import classifier_head, load_model

# Started as a file, it finds no other recipe by itself.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from recipes import command_line
from recipes.command_line import flag
from recipes.small_networks import MODELS


@dataclass
class DataArguments(command_line.ColumnArguments):
    dataset: str = flag(
        "uoft-cs/cifar10", "Hub name (ylecun/mnist, ...), or a folder of folders, one per class."
    )
    dataset_config: str | None = flag(None, "For SVHN: cropped_digits.")

    @property
    def source(self) -> tuple[str, str | None]:
        """The data set, and its configuration."""
        return self.dataset, self.dataset_config


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
    data, column = command_line.load_classes(recipe.source, "image", recipe, args.seed, state)
    head = classifier_head(data["train"].features["labels"].names)
    folder = Path(recipe.dataset).parent  # of a table that names files

    # Model: a pretrained one with a new head, or one from its configuration, for images in [-1, 1].
    set_seed(args.seed)
    if recipe.from_scratch:
        image = read_image(data["train"][0][column], recipe.dataset, folder)
        sizes = {"num_channels": 1 if image.mode == "L" else 3, "image_size": max(image.size)}
        sizes |= json.loads(recipe.model_config)
        config = AutoConfig.for_model(recipe.from_scratch, **sizes, **head)
        model = AutoModelForImageClassification.from_config(config, trust_remote_code=False)
        gray = [0.5] * sizes["num_channels"]
        processor = ViTImageProcessor(size=sizes["image_size"], image_mean=gray, image_std=gray)
    else:
        model, processor = load_model(args.model_name_or_path, "image-classification", head)
        if processor is None:
            sys.exit(f"{args.model_name_or_path} has no preprocessor_config.json: save one there.")
    mode = mode_of(model.config)

    def to_pixels(rows: dict[str, list]) -> dict[str, Any]:
        images = [read_image(stored, recipe.dataset, folder) for stored in rows[column]]
        images = [to_pil(image, mode) for image in images]
        pixels = processor(images, return_tensors="pt")["pixel_values"]
        return {"pixel_values": list(pixels), "labels": rows["labels"]}

    # Training: the stock Trainer's arguments, and a defense.
    trainer = GradGuardTrainer(
        model=model,
        args=args,
        train_dataset=data["train"].with_transform(to_pixels),
        eval_dataset=data["validation"].with_transform(to_pixels),
        processing_class=processor,
        compute_metrics=command_line.accuracy_of,
    )
    dataset = os.path.basename(recipe.dataset.rstrip("/"))
    metrics = command_line.train_and_save(
        trainer, {"tasks": "image-classification", "dataset": dataset}
    )
    command_line.report_run(trainer, metrics, "eval_images")


def mode_of(config: PretrainedConfig) -> str:
    """Of the images that a model takes."""
    return "L" if getattr(config, "num_channels", 3) == 1 else "RGB"


if __name__ == "__main__":
    command_line.run(main)
