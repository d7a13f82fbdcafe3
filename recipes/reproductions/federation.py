"""The Refiner paper's federation on CIFAR-10 in small: what clients teach a LeNet, and what an
attack reads of their messages.

Ten clients; two, drawn at random, answer each round with a protected gradient of 16 images; the
server averages and takes a step of Adam (the paper: all ten, 128 images, 8,000 rounds). PMM is the
accuracy relative to that without a defense, same seed. PSNR is what Inverting Gradients (cosine,
total variation, L-BFGS) makes of single lossless images' protected gradients at the initial
weights; the label is read off the gradient. Nothing to run by itself.
"""

import argparse
import copy
import statistics

import numpy as np
import torch
from datasets import load_dataset
from lenet import INVERTING, single_images, smoothed
from reporting import parser_of
from torch import Tensor
from transformers import set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.metrics import score_images
from hf_gradguard.models import LeakageLeNetConfig, LeakageLeNetForImageClassification
from hf_gradguard.training.partition import partition_dirichlet

CLIENTS, DRAWN, BATCH, LEARNING_RATE = 10, 2, 16, 5e-3
FULL = {"seeds": 3, "rounds": 500, "attacked": 16, "attack_steps": 60}
QUICK = {"seeds": 2, "rounds": 1, "attacked": 2, "attack_steps": 1}
PARTITIONS = ("iid", "dirichlet")


def federation_parser(description: str | None) -> argparse.ArgumentParser:
    parser = parser_of(description)
    parser.add_argument("--train", required=True, help="parquet with img and label, to train on")
    parser.add_argument("--test", required=True, help="the same, for the accuracy")
    parser.add_argument(
        "--images", required=True, help="npz with x (N, 32, 32, 3) and y: images to attack"
    )
    parser.add_argument(
        "--evaluation_network",
        required=True,
        help="a smaller one trains faster; see docs/results.md",
    )
    return parser


class Federation:
    """The data that a script was given, and what it measures on them.

    Args:
        args: Of `federation_parser`.
        plan: With `rounds`, `attacked` (how many images) and `attack_steps`; and `own` (how many of
            the attacker's own) if one who knows the defense is to choose by them.
    """

    def __init__(self, args: argparse.Namespace, plan: dict) -> None:
        self.plan, self.network = plan, {"evaluation_network": args.evaluation_network}
        self.train, self.test = as_tensors(args.train), as_tensors(args.test)
        self.images = single_images(args.images, plan["attacked"] + plan.get("own", 0))

    def accuracy(self, defense, seed: int, partition: str = "iid") -> float:
        """Test accuracy after training on clients with equal shares, or of labels drawn from a
        Dirichlet distribution.
        """
        draw, noise = (torch.Generator().manual_seed(seed + 1000 * k) for k in range(2))
        if partition == "iid":
            parts = torch.randperm(len(self.train[0]), generator=draw).chunk(CLIENTS)
        else:
            rows = partition_dirichlet(
                self.train[1].numpy(), CLIENTS, 1.0, np.random.default_rng(seed)
            )
            parts = [torch.from_numpy(mine) for mine in rows]
        model, rounds = lenet(seed), self.plan["rounds"]
        defenses = [
            copy.deepcopy(defense) for _ in parts
        ]  # what one remembers is of its client's batches
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / rounds)
        for _ in logging.tqdm(range(rounds), desc=f"{defense.name}, {partition}, seed {seed}"):
            optimizer.zero_grad()
            for client in torch.randperm(CLIENTS, generator=draw)[:DRAWN]:
                rows = parts[client][torch.randint(len(parts[client]), (BATCH,), generator=draw)]
                batch = {
                    "pixel_values": self.train[0][rows].float() / 255,
                    "labels": self.train[1][rows],
                }
                gmap = GradientMap(model, batch, second_order=defense.needs_jacobian)
                shared = defenses[client](gmap, generator=noise)
                for name, parameter in model.named_parameters():
                    mine = shared[name] / DRAWN
                    parameter.grad = mine if parameter.grad is None else parameter.grad + mine
            optimizer.step()
            schedule.step()
        return tested(model, self.test)

    def attack(self, defense, knowledge: dict | None = None) -> dict:
        """Scores of the reconstructions, and what the defense did to the gradients that they are
        from.

        Args:
            defense: Copied for each message.
            knowledge: Further settings of Inverting Gradients, of an attacker who knows the
                defense; of several values of `total_variation`, the one that is best on images of
                the attacker's own.
        """
        model, attacked = lenet(seed=0), self.plan["attacked"]
        seen, cosines, distances, norms = [], [], [], []
        images = [batch["pixel_values"] for batch in self.images]
        for number, batch in enumerate(self.images):
            gmap = GradientMap(model, batch)
            shared = copy.deepcopy(defense)(gmap, generator=torch.Generator().manual_seed(number))
            true, sent = (
                torch.cat([t.flatten() for t in g.values()]) for g in (gmap.gradient(), shared)
            )
            cosines.append(float(torch.nn.functional.cosine_similarity(true, sent, dim=0)))
            distances.append(float((true - sent).norm()))
            norms.append(float(true.norm()))
            seen.append(
                Observation(model=model, gradient=shared, input_shape=tuple(images[0].shape))
            )
        settings = INVERTING | {"steps": self.plan["attack_steps"]} | (knowledge or {})
        settings = smoothed(settings, seen[attacked:], images[attacked:])
        attack = make_attack("inverting_gradients", **settings)
        found = [
            one.input for one in attack.together(seen[:attacked], torch.Generator().manual_seed(0))
        ]
        psnr = score_images(found, images[:attacked]).per_sample["psnr"]
        means = {"cosine": cosines, "distance": distances, "norm": norms}
        means = {name: statistics.mean(values[:attacked]) for name, values in means.items()}
        return {"psnr": psnr, "total_variation": settings["total_variation"], **means}


def as_tensors(path: str) -> tuple[Tensor, Tensor]:
    data = load_dataset("parquet", data_files=path, split="train")
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in data["img"]]))
    return pixels.permute(0, 3, 1, 2), torch.tensor(data["label"])


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
