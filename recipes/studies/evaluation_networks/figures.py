r"""How well the packaged evaluation networks do on data sets they never saw.

    python -m recipes.studies.evaluation_networks.run figures --data DATA --model MODEL \
        --cards model_cards --output docs/results/evalnets

DATA: a folder with sst2/dev.tsv, wikitext2/test.txt, cifar10/cifar10_lossless_train4k.npz (`x`) and
mnist/mnist.npz (`x_test`). MODEL: sentence-transformers/all-MiniLM-L6-v2, or a folder with it. The
first 2,000 images or texts of each. Beside the other files, OUTPUT_NETWORK.md is all of one
network's figures, which `--cards` puts between the `figures` marks of its card. Blended texts have
every token's embedding mixed with a random token's, where the others have tokens replaced. Ten
minutes of one core.
"""

import re
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

from hf_gradguard.data.files import load_images, load_texts
from hf_gradguard.networks import evaluate_image_network, evaluate_text_network, load_network

from ..lib.results import named
from ..lib.tables import write_table
from .settings import IMAGE, IMAGES, QUICK_SAMPLES, SAMPLES, TEXT, TEXTS

ARGUMENTS = {
    "--data": "folder with the four data sets",
    "--model": "folder or name",
    "--cards": {"type": Path, "help": "folder of model cards to fill in"},
}


def cells(args) -> dict:
    rest = {"samples": QUICK_SAMPLES if args.quick else SAMPLES, "seed": 0}
    return {
        (network, row): {"network": network, **one, **rest}
        for network, rows in ((IMAGE, IMAGES), (TEXT, TEXTS))
        for row, one in rows.items()
    }


def prepare(args):
    torch.set_num_threads(1)

    def measure(cell: dict) -> dict:
        path, count, seed = f"{args.data}/{cell['file']}", cell["samples"], cell["seed"]
        network = load_network(cell["network"])
        if "array" in cell:
            pixels = load_images(path, column=cell["array"])[:count]
            return evaluate_image_network(network, pixels, seed=seed).to_dict()
        texts = [text for text in load_texts(path) if text.strip()][:count]
        model = AutoModel.from_pretrained(args.model, dtype=torch.float32, trust_remote_code=False)
        reads = (
            model.get_input_embeddings(),
            AutoTokenizer.from_pretrained(args.model, trust_remote_code=False),
        )
        found = evaluate_text_network(network, *reads, texts, seed=seed, blend=cell["blend"])
        return found.to_dict()

    return measure


def report(figures: dict, args) -> None:
    rows = []
    for network, found in figures.items():
        whole = []
        for data, f in found.items():
            means = " ".join(f"{mean:.2f}" for mean in f["mean_predictions"])
            rising = "yes" if f["strictly_increasing"] else "no"
            keys = ("spearman", "spearman_of_means", "mean_absolute_error")
            scores = [f"{f[key]:.3f}" for key in keys]
            whole.append([data, f"{f['samples']:,}", means, rising, *scores])
            rows.append(["" if whole[1:] else network, data, rising, scores[0], scores[2]])
        header = ["data", "samples", "mean prediction at r = 0, 0.1, ..., 1", "rising"]
        table = args.output.with_name(f"{args.output.name}_{network}")
        write_table(table, [*header, "Spearman, samples", "Spearman, means", "MAE"], whole)
        if args.cards:
            card = args.cards / network / "README.md"
            fill(card, named(table, ".md").read_text(encoding="utf-8"))
    header = ["network", "data", "means rise", "Spearman", "mean absolute error"]
    write_table(args.output, header, rows)


def fill(card: Path, table: str) -> None:
    text, filled = card.read_text(encoding="utf-8"), f"<!-- figures -->\n{table}<!-- /figures -->"
    marked = r"<!-- figures -->.*<!-- /figures -->"
    card.write_text(re.sub(marked, lambda _: filled, text, flags=re.S), encoding="utf-8")
