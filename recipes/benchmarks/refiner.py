"""What refining a batch costs, in plain gradients of the same batch, and the memory it takes.

The floor: an iteration takes seven matrix products per weight (forward, two backward, and four back
through both), where a plain gradient takes three, so ι iterations cost 7ι/3 plain gradients; the
true gradient and that of the robust data are two more, and every iteration passes through the
evaluation network and back.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoTokenizer

import hf_gradguard
from hf_gradguard import GradientMap, make_defense
from hf_gradguard.data.samples import load_texts
from hf_gradguard.randomness import Stream
from recipes.studies.lib.device import DEVICE
from recipes.studies.lib.text import NETWORK

from .measuring import RATIO, alternate, bytes_of, cells, classifier, peak, plain_gradient

BATCH, LENGTH, ROUNDS = 16, 16, 3
ARGUMENTS = {"evaluation_network": NETWORK}
CASES = {  # settings, and iterations that a visit takes
    "10 iterations": ({"iterations": 10}, 10),
    "5 iterations": ({"iterations": 5}, 5),
    "warm-started: 10 halved to 5": ({"iterations": 10, "warm_start": BATCH}, 5),
}


def words(tokenizer, size: int) -> dict[str, torch.Tensor]:
    """Sentences of `LENGTH` tokens: of random words, Refiner refuses a network as useless."""
    lines = load_texts(str(Path(hf_gradguard.__file__).parent / "data" / "sentiment" / "train.tsv"))
    texts = [" ".join(lines[4 * row : 4 * row + 4]) for row in range(size)]
    batch = dict(tokenizer(texts, truncation=True, max_length=LENGTH, return_tensors="pt"))
    batch["labels"] = torch.arange(size) % 2
    return {name: tensor.to(DEVICE) for name, tensor in batch.items()}


def measure(args) -> dict:
    torch.set_num_threads(1)
    size, rounds = (2, 1) if args.quick else (BATCH, ROUNDS)
    model = classifier(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    batch = words(tokenizer, size)
    generator = Stream.from_seeds(0)
    plain = plain_gradient(model, batch)

    def refined(**settings: int) -> Callable[[], object]:
        defense = make_defense("refiner", evaluation_network=args.evaluation_network, **settings)
        defense.prepare(model, tokenizer)
        return lambda: defense(GradientMap(model, batch), generator)

    # `alternate` runs each case once before it times it: the first visit of the warm start is not
    # timed.
    ratios = {
        label: alternate(refined(**settings), plain, rounds)
        for label, (settings, _) in CASES.items()
    }
    gradient = bytes_of(GradientMap(model, batch).parameters.values())
    memory = {
        "plain": round(peak(plain) / gradient, 2),
        "refiner": round(peak(refined(iterations=2)) / gradient, 2),
    }
    report = {"batch": [size, LENGTH], "gradient_bytes": gradient, "device": DEVICE}
    return report | {"in plain gradients": ratios, "peak memory in gradients": memory}


def table(report: dict) -> tuple[list[str], list[list[str]]]:
    ratios = report["in plain gradients"]
    return ["", *RATIO, "floor"], [
        [label, *cells(ratios[label], 1), f"{7 * count / 3 + 2:.1f}"]
        for label, (_, count) in CASES.items()
    ]
