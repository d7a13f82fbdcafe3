"""What the Trainer's meter adds to a logged step, in plain gradients of its batch: dFIL and the
bound on the influence, both by differences.

On a map and a message that are there, 16 random tokens a sample, one thread. Trying differences
out, which happens once per model and at every 16th logged step again, stands apart.
"""

import json
import tempfile

import torch

from hf_gradguard import GradGuardConfig, GradientMap, make_defense
from hf_gradguard.gradient_map.differences import by_differences
from hf_gradguard.gradient_map.parameters import cache_of
from hf_gradguard.randomness import Stream
from hf_gradguard.training.meter import LeakageMeter
from recipes.studies.lib.results import named

from .measuring import RATIO, alternate, cells, classifier, plain_gradient, random_batch

LENGTH, SAMPLES, ROUNDS = 16, (1, 4, 16, 64), 3
DEFENSES = ("gaussian_noise", "optimal_noise")


def measure(args) -> dict:
    torch.set_num_threads(1)
    model, rounds = classifier(args.model), 1 if args.quick else ROUNDS
    stored, ratios = named(args.output, ".meter.json"), {}
    if stored.exists():  # what was stopped goes on
        ratios = json.loads(stored.read_text(encoding="utf-8"))
    for count in (2,) if args.quick else SAMPLES:
        if str(count) not in ratios:
            ratios[str(count)] = logged(model, random_batch(model, count, LENGTH), rounds)
            stored.write_text(json.dumps(ratios), encoding="utf-8")
    stored.unlink()
    return {"threads": 1, "length": LENGTH, "samples": ratios}


def logged(model, batch: dict, rounds: int) -> dict[str, dict[str, float]]:
    """By defense, and for the trial."""
    gmap, ratios = GradientMap(model, batch, second_order=False), {}
    gmap.gradient()

    plain = plain_gradient(model, batch)

    def trial() -> None:
        cache_of(model).difference_plans.clear()
        by_differences(gmap)

    with tempfile.TemporaryDirectory() as folder:
        args = GradGuardConfig(folder, leakage_logging_steps=1)
        for name in DEFENSES:
            defense = make_defense(name, scale=1e-3)
            meter, message = LeakageMeter(args, defense, None), defense(gmap)

            def admit(meter=meter, message=message) -> None:
                meter.admits(gmap, message, 0, Stream())

            trial()
            ratios[name] = alternate(admit, plain, rounds)
    return ratios | {"trying out": alternate(trial, plain, rounds)}


def table(report: dict) -> tuple[list[str], list[list[str]]]:
    rows = [
        [samples, label, *cells(ratio, 1)]
        for samples, ratios in report["samples"].items()
        for label, ratio in ratios.items()
    ]
    return ["samples", "plain gradients for", *RATIO], rows
