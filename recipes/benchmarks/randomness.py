"""What unpredictable noise costs: numbers of the stream in numbers of torch's own generator, and
steps with noise in steps without a defense (AdamW included), where tensors are many and small.

The steps are those of a model of MODEL's kind with two layers of width 32. Small tensors' noise is
cut from one draw; beside it stands a draw for each tensor.
"""

from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from hf_gradguard import GradientMap
from hf_gradguard.randomness import Stream
from recipes.studies.lib.device import DEVICE

from .defenses import training_steps
from .measuring import RATIO, alternate, cells, random_batch

NUMBERS, STEPS, ROUNDS = 22_713_216, 10, 15  # as many numbers as MiniLM has parameters
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
NOISES = ("gaussian_noise", "laplace_noise")


def measure(args) -> dict:
    torch.set_num_threads(1)
    numbers, steps, rounds = (1000, 1, 1) if args.quick else (NUMBERS, STEPS, ROUNDS)
    stream, generator = Stream(), torch.Generator(DEVICE).manual_seed(0)

    def torchs() -> Tensor:
        return torch.randn(numbers, generator=generator, device=DEVICE)

    draws = {
        "normal": alternate(lambda: stream.normal((numbers,), device=DEVICE), torchs, rounds),
        "exponential": alternate(
            lambda: stream.exponential((numbers,), device=DEVICE), torchs, rounds
        ),
    }
    model = small(args.model)
    batch = random_batch(model, 16, 16)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)

    def case(name: str) -> Callable[[], object]:
        return training_steps(model, batch, optimizer, steps, name)

    ratios = {}
    for name in NOISES:
        ratios[f"{name}, small tensors together"] = alternate(case(name), case("none"), rounds)
        with patch("hf_gradguard.defenses.noise._SHARED_DRAW", 0):
            ratios[f"{name}, one by one"] = alternate(case(name), case("none"), rounds)
    return {
        "threads": torch.get_num_threads(),
        "numbers": numbers,
        "tensors": len(GradientMap(model, batch, second_order=False).parameters),
        "in torch.randn": draws,
        "in steps without a defense": ratios,
    }


def small(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(
        name, num_labels=2, **SMALL, intermediate_size=64, trust_remote_code=False
    )
    model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
    model.get_input_embeddings().requires_grad_(False)
    return model.to(DEVICE).train()


def table(report: dict) -> tuple[list[str], list[list[str]]]:
    rows = []
    for section, label in (
        ("in torch.randn", f"{report['numbers']:,} numbers, in torch.randn"),
        ("in steps without a defense", f"steps of {report['tensors']} tensors, in those without"),
    ):
        rows.append([f"**{label}**", "", ""])
        rows += [[name, *cells(ratio)] for name, ratio in report[section].items()]
    return ["", *RATIO], rows
