"""How well the packaged evaluation networks do on data sets they never saw.

    python recipes/reproductions/evalnet_figures.py --data DATA --model MODEL

DATA: a folder with sst2/dev.tsv, wikitext2/test.txt, cifar10/cifar10_lossless_train4k.npz (`x`) and mnist/mnist.npz
(`x_test`). MODEL: sentence-transformers/all-MiniLM-L6-v2, or a folder with it. Writes docs/results/evalnets.json and the
tables between the `figures` marks of the networks' cards. A minute or two on one thread.
"""

import argparse
import json
import re
from pathlib import Path

import torch
import transformers
from transformers import AutoModel, AutoTokenizer

from hf_gradguard.networks import NetworkFigures, evaluate_image_network, evaluate_text_network, load_network
from hf_gradguard.networks.data import load_images, load_texts

ROOT = Path(__file__).resolve().parents[2]
IMAGE, TEXT = "image-evaluation-network-32", "text-evaluation-network-minilm-l6"
IMAGES = {
    "CIFAR-10 (lossless)": ("cifar10/cifar10_lossless_train4k.npz", "x"),
    "MNIST test (28x28 grey, padded)": ("mnist/mnist.npz", "x_test"),
}
TEXTS = {"SST-2 dev": "sst2/dev.tsv", "WikiText-2 test": "wikitext2/test.txt"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/results/evalnets.json")
    parser.add_argument("--limit", type=int, default=2000, help="images or texts a data set, the first ones")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)

    figures: dict[str, dict[str, NetworkFigures]] = {IMAGE: {}, TEXT: {}}
    network = load_network(IMAGE)
    for name, (file, array) in IMAGES.items():
        images = load_images(str(args.data / file), column=array)[: args.limit]
        figures[IMAGE][name] = evaluate_image_network(network, images, seed=args.seed)

    network, tokenizer = load_network(TEXT), AutoTokenizer.from_pretrained(args.model)
    embedding = AutoModel.from_pretrained(args.model, dtype=torch.float32).get_input_embeddings()
    for name, file in TEXTS.items():
        texts = [text for text in load_texts(str(args.data / file)) if text.strip()][: args.limit]
        for blend in (False, True):
            row = f"{name}, blended" if blend else name
            figures[TEXT][row] = evaluate_text_network(
                network, embedding, tokenizer, texts, seed=args.seed, blend=blend
            )

    report = {
        "command": "python recipes/reproductions/evalnet_figures.py --data $DATA --model $MODEL",
        "seed": args.seed,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "networks": {name: {data: f.to_dict() for data, f in rows.items()} for name, rows in figures.items()},
    }
    args.output.write_text(json.dumps(report, indent=2) + "\n")
    for name, rows in figures.items():
        print(f"{name}\n{table(rows)}\n")
        card = ROOT / "model_cards" / name / "README.md"
        filled = f"<!-- figures -->\n{table(rows)}\n<!-- /figures -->"
        card.write_text(
            re.sub(r"<!-- figures -->.*<!-- /figures -->", lambda _, t=filled: t, card.read_text(), flags=re.S)
        )


def table(rows: dict[str, NetworkFigures]) -> str:
    lines = [
        "| data | samples | mean prediction at r = 0, 0.1, ..., 1 | rising | Spearman, samples | Spearman, means | MAE |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, f in rows.items():
        means = " ".join(f"{mean:.2f}" for mean in f.mean_predictions)
        rising = "yes" if f.strictly_increasing else "no"
        scores = f"{f.spearman:.3f} | {f.spearman_of_means:.3f} | {f.mean_absolute_error:.3f}"
        lines.append(f"| {name} | {f.samples:,} | {means} | {rising} | {scores} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
