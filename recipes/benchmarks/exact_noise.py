"""What exact noise costs: training steps behind `gaussian_noise` (AdamW included), in the same
steps whose noise is the former one, g + σ n with a float32 normal number n, which shows its inputs
in low bits. Both draw from ChaCha20.

Beside the range of rounds stands a bootstrap's 95 % interval of their median.
"""

import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from hf_gradguard.randomness import Stream

from .defenses import training_steps
from .measuring import cells, classifier, clock, random_batch, spread

BATCH, LENGTHS, ROUNDS = 16, (16, 64), 15


def measure(args) -> dict:
    torch.set_num_threads(1)
    size, lengths, rounds = (2, (4,), 2) if args.quick else (BATCH, LENGTHS, ROUNDS)
    model = classifier(args.model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
    measured = {}
    for length in lengths:
        batch = random_batch(model, size, length)
        step = training_steps(model, batch, optimizer, 1, "gaussian_noise")
        measured[f"{size} x {length} tokens"] = in_turns(step, rounds)
    return {"threads": torch.get_num_threads(), "rounds": rounds, "ratios": measured}


def in_turns(step: Callable[[], object], rounds: int) -> dict:
    """Steps with exact noise over those with float noise just before and after them."""
    with float_noise():
        step()
    step()
    ratios = []
    for _ in range(rounds):
        with float_noise():
            before = clock(step, 2)
        exact = clock(step, 2)
        with float_noise():
            after = clock(step, 2)
        ratios.append(2 * exact / (before + after))
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=rounds)) for _ in range(2000))
    return spread(ratios) | {"interval": [round(medians[k], 2) for k in (50, 1949)]}


@contextmanager
def float_noise() -> Iterator[None]:
    """Noise is added as it was before it was exact."""

    def noisy(
        stream: Stream, values: Tensor, std: Tensor, entries: int, noise: str = "gaussian"
    ) -> Tensor:
        drawn = stream.normal(values.shape, device=values.device, dtype=torch.float32)
        return values.add(drawn.mul_(std.to(drawn)))

    with patch.object(Stream, "noisy", noisy):
        yield


def table(report: dict) -> tuple[list[str], list[list[str]]]:
    rows = [
        [label, *cells(ratio), "{:.2f} to {:.2f}".format(*ratio["interval"])]
        for label, ratio in report["ratios"].items()
    ]
    return ["steps of", "median", "range", "95 % of the median"], rows
