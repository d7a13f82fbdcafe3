r"""Train a linear head on image embeddings that stay as they are, by differentially private
gradients: what a rank shares hides each of its images from everybody, by proof.

    accelerate launch recipes/image_head.py --dataset uoft-cs/cifar10 \
        --public_images tinyimagenet.npz
    accelerate launch --multi_gpu --num_processes 2 recipes/image_head.py --dataset my/images \
        --model_name_or_path microsoft/resnet-50 --public_images my/public

Data sets are those of image_classification.py. An embedding is what the encoder pools, or the mean
of its last states. `--public_images` is any folder, parquet or npz file of images that are nobody's
secret: no training images, since their mean is saved. Embeddings are whitened by them, which gives
back some of what the noise costs. This is for messages of about 1,000 images. For smaller ones see
image_classification.py --head. Two ranks without GPUs: as there. `--config FILE.yaml` holds flags;
flags override it.
"""

import hashlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import AutoImageProcessor, AutoModel

from hf_gradguard.data.files import COLUMNS, load_rows
from hf_gradguard.data.images import read_image, to_pil
from hf_gradguard.data.samples import Labeled
from hf_gradguard.models import explain_missing_model
from hf_gradguard.train import mode_of

# Started as a file, it finds no other recipe by itself.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from recipes import head
from recipes.command_line import DataArguments, flag, load_classes, parse_arguments, run


@dataclass
class RecipeArguments(DataArguments):
    public_images: str | None = flag(
        None, "Folder, parquet or npz file of public images, to whiten embeddings. Default: none."
    )


@dataclass
class Arguments(head.Arguments):
    output_dir: str = flag("runs/image_head", "Where the head, its card and metrics.json go.")
    model_name_or_path: str | None = flag("facebook/dinov2-small", "Any encoder of images.")


class Encoder:
    """What a model pools, or the mean of its last states over tokens or places."""

    def __init__(self, name: str, device: torch.device) -> None:
        with explain_missing_model(name):
            self.processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
            model, loading_info = AutoModel.from_pretrained(
                name, trust_remote_code=False, output_loading_info=True
            )
        self.model = getattr(model, "vision_model", model).eval().to(device)  # CLIP reads texts too
        lacking = sorted(loading_info["missing_keys"])
        self._pools = not any("pooler" in key for key in lacking)  # a classifier's may not
        if unpooled := [key for key in lacking if "pooler" not in key]:
            sys.exit(
                f"{name} was saved without {', '.join(unpooled[:3])}, which would be random, and "
                "other ones in the next run. Take another encoder."
            )

    @torch.no_grad()
    def __call__(self, stored: Sequence[Any]) -> Tensor:
        """`(N, width)`."""
        pixels = self.process(stored)
        output = self.model(
            pixel_values=pixels["pixel_values"].to(self.model.device, self.model.dtype)
        )
        pooled = getattr(output, "pooler_output", None)
        if pooled is None or not self._pools:
            states = output.last_hidden_state  # (N, tokens, width) or (N, width, rows, columns)
            pooled = states.mean(1 if states.ndim == 3 else (2, 3))
        return pooled.flatten(1).float().cpu()

    def process(self, stored: Sequence[Any]) -> Any:
        """Its inputs."""
        mode = mode_of(self.model.config)
        images = [to_pil(read_image(image, "--dataset"), mode) for image in stored]
        return self.processor(images, return_tensors="pt")


def main() -> None:
    recipe, args = parse_arguments(RecipeArguments, Arguments)
    state = PartialState(cpu=args.use_cpu)
    encoder = Encoder(args.model_name_or_path, state.device)

    # Each image is embedded once, and not before all is well.
    data, column = load_classes(recipe.source, "image", recipe, args.seed, state)
    public = None
    if recipe.public_images is not None:
        secret = (read_image(stored, recipe.dataset) for stored in data["train"][column])
        public = public_images(recipe.public_images, secret)
    card = {"tasks": "image-classification"}
    card["dataset"] = os.path.basename(recipe.dataset.rstrip("/"))
    data = head.embedded(data, column, encoder, state)
    whitening = head.whitening_by(public, encoder, "public images")
    plain = head.plain_head(data, whitening, args.seed)
    head.train(args, data, plain, "eval_images", **card)


def public_images(path: str, secret: Iterable[Any]) -> Sequence[Any]:
    """What a folder or a file holds, where that is enough and not mostly the secret images."""
    if not os.path.exists(path):
        sys.exit(f"--public_images {path} is no folder and no file.")
    try:
        labeled = Labeled(load_rows(path), path, "image", None)
        images = labeled.rows[labeled.input_column]  # read when they are asked for
        bare = [_bare(image) for image in labeled.inputs(range(len(labeled)))]
    except ValueError:
        images, bare = [], []  # said below, with what could be read
    if len(set(bare)) < 2:
        sys.exit(
            f"--public_images {path} gives {len(set(bare))} different image(s), and whitening "
            "takes two or more, better thousands. Name a folder of images, a .parquet file with a "
            f"column {' or '.join(COLUMNS['image'])}, or an .npz file with such an array of bytes, "
            "(N, H, W) or (N, H, W, 3)."
        )
    description = f"images of --public_images {path} are training images"
    head.check_public(bare, map(_bare, secret), description)
    return images


def _bare(image: Any) -> str:
    pixels = to_pil(image, "RGB")
    return f"{pixels.size} {hashlib.sha256(pixels.tobytes()).hexdigest()}"


if __name__ == "__main__":
    run(main)
