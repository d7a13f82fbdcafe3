"""How good are the packaged evaluation networks? train_evaluation_network.py trains them."""

import re
from pathlib import Path

import torch
from transformers import AutoModel

from hf_gradguard.data.samples import load_images, load_texts
from hf_gradguard.networks import load_network
from hf_gradguard.networks.judging import evaluate_image_network, evaluate_text_network

from ..study import Study
from .lib.results import named
from .lib.tables import write_table
from .lib.text import load_tokenizer

IMAGE, TEXT = "image-evaluation-network-32", "text-evaluation-network-minilm-l6"
ROWS: dict[str, dict[str, dict]] = {
    IMAGE: {
        "CIFAR-10 (lossless)": {"file": "cifar10/cifar10_lossless_train4k.npz", "array": "x"},
        "MNIST test (28x28 gray, padded)": {"file": "mnist/mnist.npz", "array": "x_test"},
    },
    TEXT: {
        "SST-2 dev": {"file": "sst2/dev.tsv", "blend": False},
        "SST-2 dev, blended": {"file": "sst2/dev.tsv", "blend": True},
        "WikiText-2 test": {"file": "wikitext2/test.txt", "blend": False},
        "WikiText-2 test, blended": {"file": "wikitext2/test.txt", "blend": True},
    },
}


class EvaluationNetworks(Study):
    """How well the packaged evaluation networks do on data sets they never saw.

    Conditions and figures: docs/findings/refiner.md.
    """

    ARGUMENTS = {
        "--data": "folder with the four data sets",
        "--model": "folder or name",
        "--cards": {"type": Path, "help": "folder of model cards to fill in"},
    }

    def cells(self) -> dict:
        sizes = {"samples": 6 if self.quick else 2000, "seed": 0}
        return {
            (network, row): {"network": network, **cell, **sizes}
            for network, rows in ROWS.items()
            for row, cell in rows.items()
        }

    def load(self) -> None:
        torch.set_num_threads(1)

    def measure(self, cell: dict) -> dict:
        path, count, seed = f"{self.args.data}/{cell['file']}", cell["samples"], cell["seed"]
        network = load_network(cell["network"])
        if "array" in cell:
            pixels = load_images(path, column=cell["array"])[:count]
            return evaluate_image_network(network, pixels, seed=seed).to_dict()
        texts = [text for text in load_texts(path) if text.strip()][:count]
        name = self.args.model
        model = AutoModel.from_pretrained(name, dtype=torch.float32, trust_remote_code=False)
        inputs = model.get_input_embeddings(), load_tokenizer(name)
        return evaluate_text_network(
            network, *inputs, texts, seed=seed, blend=cell["blend"]
        ).to_dict()

    def report(self, metrics: dict) -> None:
        rows = []
        for network, cells in metrics.items():
            network_rows = []
            for data, cell in cells.items():
                means = " ".join(f"{mean:.2f}" for mean in cell["mean_predictions"])
                rising = "yes" if cell["strictly_increasing"] else "no"
                keys = ("spearman", "spearman_of_means", "mean_absolute_error")
                scores = [f"{cell[key]:.3f}" for key in keys]
                network_rows.append([data, f"{cell['samples']:,}", means, rising, *scores])
                rows.append(
                    ["" if network_rows[1:] else network, data, rising, scores[0], scores[2]]
                )
            header = ["data", "samples", "mean prediction at r = 0, 0.1, ..., 1", "rising"]
            table = self.output.with_name(f"{self.output.name}_{network}")
            write_table(
                table, [*header, "Spearman, samples", "Spearman, means", "MAE"], network_rows
            )
            if self.args.cards:
                card = self.args.cards / network / "README.md"
                fill(card, named(table, ".md").read_text(encoding="utf-8"))
        header = ["network", "data", "means rise", "Spearman", "mean absolute error"]
        write_table(self.output, header, rows)


def fill(card: Path, table: str) -> None:
    text, filled = card.read_text(encoding="utf-8"), f"<!-- figures -->\n{table}<!-- /figures -->"
    marked = r"<!-- figures -->.*<!-- /figures -->"
    card.write_text(re.sub(marked, lambda _: filled, text, flags=re.S), encoding="utf-8")
