"""What a candidate costs of an attack that ranks candidates by likelihood, behind noise of twenty
times the gradient: by layer products, and with every gradient written out, in the same run.

Seconds are of one thread. The table says by how much log-likelihoods differ at most.
"""

import functools

import torch

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack

from .measuring import cells, classifier, clock, random_batch, spread

LENGTH, CANDIDATES, WRITTEN, ROUNDS = 14, (64, 256), 4, 3
DEFENSES = ("gaussian_noise", "optimal_noise")


def measure(args) -> dict:
    torch.set_num_threads(1)
    counts, few, rounds = ((8,), 2, 1) if args.quick else (CANDIDATES, WRITTEN, ROUNDS)
    model = classifier(args.model).eval()
    listed = [random_batch(model, 1, LENGTH)["input_ids"][0] for _ in range(max(counts))]
    batch = random_batch(model, 1, LENGTH) | {"input_ids": listed[0][None]}
    report: dict = {"threads": 1, "length": LENGTH, "candidates": counts, "cases": {}}
    attacks = {
        f"products, {count} candidates": (
            make_attack("candidates", candidates=listed[:count]), count,
        )
        for count in counts
    } | {
        "written out": (
            make_attack("candidates", candidates=listed[:few], vectorized=False), few,
        ),
    }  # fmt: skip
    for name in DEFENSES:
        defense, gmap = make_defense(name, relative_scale=20.0), GradientMap(model, batch)
        message = defense(gmap)
        observation = Observation(
            model, message, (1, LENGTH), batch["labels"], mechanism=defense.mechanism(message)
        )
        scores = [attack(observation).scores[:few] for attack, _ in attacks.values()]
        differences = [float((other - scores[-1]).abs().max()) for other in scores]
        report["cases"][name] = {
            label: spread(
                [clock(functools.partial(attack, observation)) / size for _ in range(rounds)], 4
            )
            for label, (attack, size) in attacks.items()
        } | {"difference": max(differences)}
    return report


def table(report: dict) -> tuple[list[str], list[list[str]]]:
    return ["defense", "gradients", "seconds a candidate", "range", "difference in nats"], [
        [name, label, *cells(case[label], 3), f"{case['difference']:.3f}"]
        for name, case in report["cases"].items()
        for label in case
        if label != "difference"
    ]
