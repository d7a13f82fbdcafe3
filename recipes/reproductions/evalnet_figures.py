"""How well the packaged evaluation networks do on data sets they never saw.

    python recipes/reproductions/evalnet_figures.py --data DATA --model MODEL --cards model_cards \
        --output docs/results/evalnets

DATA: a folder with sst2/dev.tsv, wikitext2/test.txt, cifar10/cifar10_lossless_train4k.npz (`x`) and
mnist/mnist.npz (`x_test`). MODEL: sentence-transformers/all-MiniLM-L6-v2, or a folder with it. The
first 2,000 images or texts of each. Beside the other files, OUTPUT_NETWORK.md is all of one
network's figures, which `--cards` puts between the `figures` marks of its card. Blended texts have
every token's embedding mixed with a random token's, where the others have tokens replaced.
"""

import re
from pathlib import Path

import torch
from reporting import Results, named, parser_of, write_table
from transformers import AutoModel, AutoTokenizer

from hf_gradguard.data.files import load_images, load_texts
from hf_gradguard.networks import evaluate_image_network, evaluate_text_network, load_network

IMAGE, TEXT = "image-evaluation-network-32", "text-evaluation-network-minilm-l6"
IMAGES = {
    "CIFAR-10 (lossless)": ("cifar10/cifar10_lossless_train4k.npz", "x"),
    "MNIST test (28x28 gray, padded)": ("mnist/mnist.npz", "x_test"),
}
TEXTS = {"SST-2 dev": "sst2/dev.tsv", "WikiText-2 test": "wikitext2/test.txt"}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the four data sets")
    parser.add_argument("--model", required=True, help="folder or name")
    parser.add_argument("--cards", type=Path, help="folder of model cards to fill in")
    args = parser.parse_args()
    torch.set_num_threads(1)
    plan = {"samples": 6 if args.quick else 2000, "seed": 0}
    results = Results(args.output, plan)

    def images(file: str, array: str) -> dict:
        pixels = load_images(str(args.data / file), column=array)[: plan["samples"]]
        return evaluate_image_network(load_network(IMAGE), pixels, seed=plan["seed"]).to_dict()

    def texts(file: str, blend: bool) -> dict:
        found = [text for text in load_texts(str(args.data / file)) if text.strip()][
            : plan["samples"]
        ]
        embedding = AutoModel.from_pretrained(
            args.model, dtype=torch.float32
        ).get_input_embeddings()
        tokenizer, seed = AutoTokenizer.from_pretrained(args.model), plan["seed"]
        return evaluate_text_network(
            load_network(TEXT), embedding, tokenizer, found, seed=seed, blend=blend
        ).to_dict()

    for name, (file, array) in IMAGES.items():
        results.get((IMAGE, name), images, file, array)
    for name, file in TEXTS.items():
        for blend in (False, True):
            results.get((TEXT, f"{name}, blended" if blend else name), texts, file, blend)
    report(results.figures, args.output, args.cards)


def report(figures: dict, output: Path, cards: Path | None) -> None:
    rows = []
    for network, found in figures.items():
        whole = []
        for data, f in found.items():
            means = " ".join(f"{mean:.2f}" for mean in f["mean_predictions"])
            rising = "yes" if f["strictly_increasing"] else "no"
            scores = [
                f"{f[key]:.3f}" for key in ("spearman", "spearman_of_means", "mean_absolute_error")
            ]
            whole.append([data, f"{f['samples']:,}", means, rising, *scores])
            rows.append(["" if whole[1:] else network, data, rising, scores[0], scores[2]])
        header = ["data", "samples", "mean prediction at r = 0, 0.1, ..., 1", "rising"]
        table = output.with_name(f"{output.name}_{network}")
        write_table(table, [*header, "Spearman, samples", "Spearman, means", "MAE"], whole)
        if cards:
            fill(cards / network / "README.md", named(table, ".md").read_text(encoding="utf-8"))
    write_table(output, ["network", "data", "means rise", "Spearman", "mean absolute error"], rows)


def fill(card: Path, table: str) -> None:
    filled = f"<!-- figures -->\n{table}<!-- /figures -->"
    text = re.sub(
        r"<!-- figures -->.*<!-- /figures -->",
        lambda _: filled,
        card.read_text(encoding="utf-8"),
        flags=re.S,
    )
    card.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
