"""What sensitivities cost where derivatives jump (ReLU, max pooling): one probe by differences in
which every unit keeps its side, and one by second derivatives, in plain gradients of the same
batch; and how far both are apart.

Weights are random but for the first row, an encoder without kinks. One thread, processor time.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    OPTConfig,
    OPTForSequenceClassification,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForSequenceClassification,
)

from hf_gradguard import GradientMap
from hf_gradguard.randomness import Stream

from .measuring import RATIO, alternate, cells, classifier, plain_gradient, random_batch

ROUNDS, TEXTS, TOKENS, IMAGES = 5, 8, 32, 8


def distilbert(size: int) -> nn.Module:
    config = DistilBertConfig(dim=32 * size, hidden_dim=128 * size, n_layers=6, n_heads=size)
    return DistilBertForSequenceClassification(config)


def opt(size: int) -> nn.Module:
    config = OPTConfig(
        hidden_size=32 * size, word_embed_proj_dim=32 * size, ffn_dim=128 * size,
        num_hidden_layers=6, num_attention_heads=size,
    )  # fmt: skip
    return OPTForSequenceClassification(config)


def t5(size: int) -> nn.Module:
    config = T5Config(
        d_model=32 * size, d_kv=32, d_ff=128 * size, num_layers=4, num_heads=size,
        decoder_start_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return T5ForSequenceClassification(config)


def resnet18(size: int) -> nn.Module:
    widths = [64, 128, 256, 512] if size > 1 else [8, 8, 8, 8]
    config = ResNetConfig(
        hidden_sizes=widths, embedding_size=widths[0], depths=[2, 2, 2, 2], layer_type="basic",
        num_labels=10,
    )  # fmt: skip
    return ResNetForImageClassification(config).eval()


class LeNet(nn.Module):
    """Two convolutions with ReLU and max pooling, and three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84),
            nn.ReLU(), nn.Linear(84, 10),
        )  # fmt: skip

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict:
        return {"loss": nn.functional.cross_entropy(self.layers(pixel_values), labels)}


TEXT_MODELS: dict[str, Callable[[int], nn.Module]] = {
    "DistilBERT": distilbert, "OPT": opt, "T5": t5,
}  # fmt: skip
IMAGE_MODELS: dict[str, Callable[[int], nn.Module]] = {
    "ResNet-18": resnet18, "LeNet with ReLU": lambda _: LeNet(),
    "LeNet with ReLU, 64 images": lambda _: LeNet(),
}  # fmt: skip


def measure(args) -> dict:
    torch.set_num_threads(1)
    rounds, size = (1, 1) if args.quick else (ROUNDS, 12)
    texts, tokens = (2, 4) if args.quick else (TEXTS, TOKENS)
    report = {}
    smooth = classifier(args.model)
    report["the encoder, no kinks"] = _measured(smooth, random_batch(smooth, texts, tokens), rounds)
    for name, make in TEXT_MODELS.items():
        torch.manual_seed(0)
        model = make(size).train()
        model.get_input_embeddings().requires_grad_(False)
        batch = random_batch(model, texts, tokens)
        batch["input_ids"][:, -1] = 1  # T5 reads its class at the end of the text
        report[name] = _measured(model, batch, rounds)
    for name, make in IMAGE_MODELS.items():
        torch.manual_seed(0)
        small = args.quick or name.startswith("LeNet")
        count, width = (64 if "64" in name else 2, 32) if small else (IMAGES, 64)
        batch = {
            "pixel_values": torch.randn(count, 3, width, width),
            "labels": torch.arange(count) % 10,
        }
        report[name] = _measured(make(size), batch, rounds)
    return {"models": report, "texts": [texts, tokens], "images": IMAGES}


def _measured(model: nn.Module, batch: dict, rounds: int) -> dict:
    def probe(method: str, split: bool = True) -> dict:
        gmap = GradientMap(model, batch, second_order=method == "exact")
        return gmap.squared_sensitivity(1, Stream.from_seeds(1), split=split, method=method)

    plain = plain_gradient(model, batch)
    # Dropout draws the same masks again: the state of the generator decides about them.
    state = torch.get_rng_state()
    unsplit = _flat(probe("difference", split=False))
    torch.set_rng_state(state)
    exact = _flat(probe("exact"))
    return {
        "difference": alternate(lambda: probe("difference"), plain, rounds),
        "exact": alternate(lambda: probe("exact"), plain, max(rounds // 2, 1)),
        "error": round(float((unsplit - exact).norm() / exact.norm()), 4),
    }


def _flat(squares: dict) -> torch.Tensor:
    """Roots, as products with J are."""
    return torch.cat([tensor.flatten() for tensor in squares.values()]).sqrt()


def table(report: dict) -> tuple[list[str], list[list[str]]]:
    header = ["model", *(f"by differences, {part}" for part in RATIO)]
    header += [*(f"by second derivatives, {part}" for part in RATIO), "apart"]
    rows = [
        [name, *cells(row["difference"]), *cells(row["exact"]), f"{row['error']:.1%}"]
        for name, row in report["models"].items()
    ]
    return header, rows
