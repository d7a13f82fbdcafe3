r"""How near do estimates of s² come to the optimum, and how old may averages grow?

    python -m recipes.studies.shapes.run estimates --model MODEL --data_dir SST2 \
        --output docs/results/shapes_estimates

An encoder is fine-tuned as in `quality`. At some steps batches that nothing was learned of are
looked at, of 16 phrases and of one: Tr J_F·|U₂| of noise shaped by estimates of their own s², of k
probes, squared sample by sample or whole; and by averages that were fed at every n-th message, the
last of them n steps ago. It is given over its least value, (Σ s|g|)², with s² from 24 split probes
that no estimate saw (96 for one phrase), which are themselves off by half a percent to 2 %.
15 minutes of one core.
"""

import numpy as np
import torch
from transformers.utils import logging

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.randomness import Stream

from ..lib.tables import write_table
from .quality import _task, flat, freeze, short
from .settings import AVERAGES, ESTIMATES, TASKS

ARGUMENTS = {"--model": "a text encoder and its tokenizer", "--data_dir": "folder of train.tsv"}
STEPS, PROBES, SEEDS, BATCHES, BATCH = (0, 20, 40, 100), {16: 24, 1: 96}, 1, 3, 16


def cells(args) -> dict:
    small = {"batches": 1, "probes": 2, "size": 2, "batch": 2, "step": 1} if args.quick else {}
    return {
        (str(step), str(size), str(seed)): {
            "task": "minilm", "learning_rate": TASKS["minilm"]["learning_rate"], "step": step,
            "size": size, "seed": seed, "batches": BATCHES, "probes": PROBES[size],
            "batch": BATCH, "averages": AVERAGES, "estimates": ESTIMATES,
        }
        | small
        for seed in range(1 if args.quick else SEEDS)
        for step in (STEPS[:1] if args.quick else STEPS)
        for size in PROBES
    }  # fmt: skip


def prepare(args):
    torch.set_num_threads(1)
    return lambda cell: measure(cell, *_task(cell, args))


def measure(cell: dict, model, draw) -> dict:
    """Tr J_F·|U₂| over its least value, of every row and batch."""
    clients = {
        row: make_defense("optimal_noise", relative_scale=1.0, shape=shape, refresh_every=1)
        for row, (shape, _every) in cell["averages"].items()
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=cell["learning_rate"])
    model.train()
    for step in logging.tqdm(range(cell["step"]), desc=f"to step {cell['step']}"):
        batch = draw(cell["batch"])
        learn(cell, clients, model, batch, step)
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    if not cell["step"]:
        learn(cell, clients, model, draw(cell["batch"]), 0)
    freeze(model)
    found: dict = {row: [] for row in ("uniform", *clients, *cell["estimates"])}
    for number in range(cell["batches"]):
        gmap = GradientMap(model, draw(cell["size"]), second_order=False)
        s = flat(gmap.squared_sensitivity(cell["probes"], Stream.from_seeds(1, number)))
        g = flat(gmap.gradient()).square()
        least = float((s * g).sqrt().sum()) ** 2

        def ratio(variance: torch.Tensor, s=s, g=g, least=least) -> float:
            information = float(torch.where(s > 0, s / variance, 0.0).sum())
            return round(information * float((g * variance).sum()) / least, 4)

        found["uniform"].append(ratio(torch.ones_like(s)))
        for row, defense in clients.items():
            state = defense.state_dict()
            state["calls"] = torch.tensor(1)  # so that it does not learn
            defense.load_state_dict(state)
            defense.refresh_every = 10**9
            found[row].append(ratio(flat(defense(gmap).noise.added)))
            defense.refresh_every = 1
        for row, (probes, split) in cell["estimates"].items():
            own = gmap.squared_sensitivity(probes, Stream.from_seeds(2, number), split=split)
            roots = flat(own).sqrt().clamp(min=1e-30)
            found[row].append(ratio(roots / g.sqrt().clamp(min=1e-12)))
    return found


def learn(cell: dict, clients: dict, model, batch: dict, step: int) -> None:
    """A message of each client whose turn it is."""
    gmap = GradientMap(model, batch, second_order=False)
    for row, defense in clients.items():
        if step % cell["averages"][row][1] == 0:
            defense(gmap)


def report(figures: dict, args) -> None:
    rows = []
    for step, sizes in figures.items():
        for size, seeds in sizes.items():
            for row in next(iter(seeds.values())):
                ratios = [ratio for found in seeds.values() for ratio in found[row]]
                said = f"{short(np.median(ratios))} [{short(min(ratios))}, {short(max(ratios))}]"
                rows.append([step, size, row, said])
    write_table(args.output, ["step", "phrases", "noise", "over the optimum"], rows)
