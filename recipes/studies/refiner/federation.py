"""The Refiner paper's federation on CIFAR-10 in small: what clients teach a LeNet, and what an
attack reads of their messages.

Ten clients; two, drawn at random, answer each round with a protected gradient of 16 images; the
server averages and takes a step of Adam (the paper: all ten, 128 images, 8,000 rounds). PMM is the
accuracy relative to that without a defense, same seed. PSNR is what Inverting Gradients (cosine,
total variation, L-BFGS) makes of single lossless images' protected gradients at the initial
weights; the label is read off the gradient.
"""

import copy
import statistics

import numpy as np
import torch
from transformers import set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.metrics import score_images
from hf_gradguard.randomness import Stream
from hf_gradguard.training.clients.partition import partition_dirichlet
from recipes.small_networks import LeakageLeNetConfig, LeakageLeNetForImageClassification

from ..lib.defenses import published
from ..lib.images import QUICK_SMOOTHING, parquet_images, single_images, smoothed
from .settings import (
    ATTACKED,
    OWN,
    QUICK_ATTACKED,
    QUICK_OWN,
    QUICK_ROUNDS,
    QUICK_STEPS,
    ROUNDS,
    UNKNOWING,
)

CLIENTS, DRAWN, BATCH, LEARNING_RATE = 10, 2, 16, 5e-3
TRAINING = {"--train": "parquet with img and label, to train on", "--test": "the same, to test on"}
ARGUMENTS = TRAINING | {
    "--images": "npz with x (N, 32, 32, 3) and y: images to attack",
    "--evaluation_network": "a smaller one trains faster; see docs/results.md",
}


def learning(quick: bool, defense: str, strength: dict, partition: str, seed: int) -> dict:
    """Settings of a training run."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    defended = {"defense": defense, "strength": strength}
    return {"measure": "accuracy", **defended, "partition": partition, **rounds, "seed": seed}


def attack(quick: bool, defense: str, strength: dict, knowledge: dict | None = None) -> dict:
    """Settings of an attack, by one who knows the defense if there is `knowledge`: further settings
    of Inverting Gradients; of several values of `total_variation` it takes the one that is best on
    images of the attacker's own.
    """
    settings = UNKNOWING | (QUICK_STEPS if quick else {}) | (knowledge or {})
    settings |= QUICK_SMOOTHING if quick and knowledge else {}
    cell = {"measure": "attack", "defense": defense, "strength": strength, "settings": settings}
    own = (QUICK_OWN if quick else OWN) if knowledge else {}
    return cell | (QUICK_ATTACKED if quick else ATTACKED) | own


def prepare(args):
    """A function from settings to figures, on the data that the command names."""
    train, test = parquet_images(args.train), parquet_images(args.test)

    def measure(cell: dict):
        network = {}
        if cell["defense"] == "refiner":
            network = {"evaluation_network": args.evaluation_network}
        defense = published(cell["defense"], **cell["strength"], **network)
        if cell["measure"] == "accuracy":
            return accuracy(cell, defense, train, test)
        images = single_images(args.images, cell["samples"] + cell.get("own", 0))
        return attacked(cell, defense, images)

    return measure


def accuracy(cell: dict, defense, train: tuple, test: tuple) -> float:
    """Test accuracy after training on clients with equal shares, or of labels drawn from a
    Dirichlet distribution.
    """
    (images, labels), seed, rounds = train, cell["seed"], cell["rounds"]
    draw = torch.Generator().manual_seed(seed)
    noise = Stream.from_seeds(seed + 1000)
    if cell["partition"] == "iid":
        parts = torch.randperm(len(images), generator=draw).chunk(CLIENTS)
    else:
        shares = partition_dirichlet(labels.numpy(), CLIENTS, 1.0, np.random.default_rng(seed))
        parts = [torch.from_numpy(mine) for mine in shares]
    model = lenet(seed)
    defenses = [copy.deepcopy(defense) for _ in parts]  # what one remembers is of its own batches
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / rounds)
    title = f"{defense.name}, {cell['partition']}, seed {seed}"
    for _ in logging.tqdm(range(rounds), desc=title):
        optimizer.zero_grad()
        for client in torch.randperm(CLIENTS, generator=draw)[:DRAWN]:
            rows = parts[client][torch.randint(len(parts[client]), (BATCH,), generator=draw)]
            batch = {"pixel_values": images[rows].float() / 255, "labels": labels[rows]}
            gmap = GradientMap(model, batch, second_order=defense.facts.needs_second_order)
            shared = defenses[client](gmap, generator=noise)
            for name, parameter in model.named_parameters():
                mine = shared[name] / DRAWN
                parameter.grad = mine if parameter.grad is None else parameter.grad + mine
        optimizer.step()
        schedule.step()
    return tested(model, test)


def attacked(cell: dict, defense, batches: list[dict]) -> dict:
    """Scores of the reconstructions, and what the defense did to the gradients that they are from.

    Args:
        cell: Settings.
        defense: Copied for each message.
        batches: Those attacked, and then the attacker's own.
    """
    model, count = lenet(seed=0), cell["samples"]
    seen, cosines, distances, norms = [], [], [], []
    images = [batch["pixel_values"] for batch in batches]
    for number, batch in enumerate(batches):
        gmap = GradientMap(model, batch)
        shared = copy.deepcopy(defense)(gmap, generator=Stream.from_seeds(number))
        true, sent = (flat(gradient) for gradient in (gmap.gradient(), shared))
        cosines.append(float(torch.nn.functional.cosine_similarity(true, sent, dim=0)))
        distances.append(float((true - sent).norm()))
        norms.append(float(true.norm()))
        seen.append(Observation(model=model, gradient=shared, input_shape=tuple(images[0].shape)))
    settings = smoothed(cell["settings"], seen[count:], images[count:])
    inverting = make_attack("inverting_gradients", **settings)
    found = inverting.together(seen[:count], torch.Generator().manual_seed(0))
    psnr = score_images([one.input for one in found], images[:count]).per_sample["psnr"]
    means = {"cosine": cosines, "distance": distances, "norm": norms}
    means = {name: statistics.mean(values[:count]) for name, values in means.items()}
    return {"psnr": psnr, "total_variation": settings["total_variation"], **means}


def flat(gradient: dict) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in gradient.values()])


def lenet(seed: int) -> LeakageLeNetForImageClassification:
    set_seed(seed)
    return LeakageLeNetForImageClassification(LeakageLeNetConfig()).eval()


def tested(model, test: tuple) -> float:
    """Accuracy on test images."""
    with torch.no_grad():
        right = [
            model(x.float() / 255).logits.argmax(1) == y
            for x, y in zip(*(t.split(500) for t in test), strict=True)
        ]
    return float(torch.cat(right).float().mean())


def pmm(accuracies: dict[str, float], plain: dict[str, float]) -> list[float]:
    """Accuracies relative to those without a defense, in %, seed by seed."""
    return [100 * one / plain[seed] for seed, one in accuracies.items()]
