r"""Train the evaluation networks that come with the package.

    python -m recipes.studies.train_evaluation_network text --model MODEL \
        --data wikitext2/train.txt
    python -m recipes.studies.train_evaluation_network image --data tinyimagenet32_10k_2k.npz

MODEL: sentence-transformers/all-MiniLM-L6-v2, or a folder with it. The data: WikiText-2's raw
training text, a paragraph a line, and an npz with `x_train`, uint8 (N, 32, 32, 3), Tiny ImageNet at
32x32. One thread, a quarter of an hour each. The cards beside the weights are written by hand;
evaluation_networks.py fills in their figures.
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

from hf_gradguard.data.samples import load_images, load_texts
from hf_gradguard.models import explain_missing_model
from hf_gradguard.networks import save_network, train_image_network, train_text_network

from .evaluation_networks import IMAGE, TEXT

BASE_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
TRAIN_IMAGE = {"epochs": 20, "batch_size": 128, "learning_rate": 5e-4}
TRAIN_TEXT = {
    "steps": 5000, "batch_size": 64, "learning_rate": 2e-3, "max_length": 48, "blended": 0.25,
    "jitter": 0.2,
}  # fmt: skip
CARDS = Path(__file__).resolve().parents[2] / "model_cards"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("image", "text"))
    parser.add_argument("--data", required=True, help="the file to train on")
    parser.add_argument(
        "--model", default=BASE_MODEL, help="text: the model whose token embeddings are judged"
    )
    parser.add_argument(
        "--filters", type=int, nargs="+", help="image: of each convolution, instead of 128 256 512"
    )
    parser.add_argument("--output", type=Path, help="default: the network's folder in model_cards/")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads", type=int, default=1, help="the weights depend on it, in the last digits"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    started = time.perf_counter()
    if args.kind == "image":
        filters = {"filters": args.filters} if args.filters else {}
        network = train_image_network(
            load_images(args.data), seed=args.seed, **TRAIN_IMAGE, **filters
        )
        output = args.output or CARDS / IMAGE
    else:
        with explain_missing_model(args.model):
            tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
            embedding = AutoModel.from_pretrained(
                args.model, dtype=torch.float32, trust_remote_code=False
            ).get_input_embeddings()
        network = train_text_network(
            embedding,
            tokenizer,
            load_texts(args.data),
            base_model=BASE_MODEL,
            seed=args.seed,
            **TRAIN_TEXT,
        )
        output = args.output or CARDS / TEXT
    save_network(network, output)
    size = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    print(f"{time.perf_counter() - started:.0f} s, {size / 1e6:.2f} MB -> {output}")


if __name__ == "__main__":
    main()
