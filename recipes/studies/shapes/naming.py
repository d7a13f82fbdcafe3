r"""Does the shape of noise, or what pruning kept, name the text?

    python -m recipes.studies.shapes.run naming --model MODEL --sst2 SST2 \
        --output docs/results/shapes_naming

An encoder cut to two layers, and one sentence a message. An attacker has 28 sentences of equal
length and label, one of which was the client's: of the message that is looked at, or of the one
before it. They know the defense, the model and all batches before the last two, and so can tell how
each candidate would shape the noise. They look at shapes alone: the candidate is named whose shape
has the largest correlation with log y² over all coordinates (pruning: with what was kept). A blind
guess names 1 of 28. 40 minutes of one core.
"""

import numpy as np
import torch
from scipy.stats import binomtest
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from hf_gradguard import GradientMap, make_defense

from ..lib.tables import write_table
from ..lib.text import batches_of_one, of_usual_length, sst2
from .settings import CANDIDATES, HISTORY, MESSAGES, STRENGTHS, TARGETS, TRIALS

ARGUMENTS = {"--model": "a BERT and its tokenizer", "--sst2": "folder of dev.tsv"}


def cells(args) -> dict:
    size = {"candidates": 3, "trials": 1, "history": 1} if args.quick else {}
    return {
        (row, _said(strength), target): {
            "defense": defense,
            "strength": strength,
            "target": target,
            "candidates": CANDIDATES,
            "trials": TRIALS,
            "history": HISTORY,
        }
        | size
        for row, defense in MESSAGES.items()
        for strength in STRENGTHS["pruning" if "pruning" in row else "noise"]
        for target in (TARGETS if "past" in row else TARGETS[:1])
    }


def prepare(args):
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        args.model, num_hidden_layers=2, trust_remote_code=False
    ).eval()
    texts = batches_of_one(tokenizer, of_usual_length(sst2(args.sst2)))
    lengths = [text["input_ids"].shape[1] for text in texts]
    common = max(set(lengths), key=lengths.count)
    alike = [t for t, n in zip(texts, lengths, strict=True) if n == common and t["labels"] == 1]
    return lambda cell: {"named": name_all(cell, model, alike)}


def report(figures: dict, args) -> None:
    rows = []
    for row, strengths in figures.items():
        for strength, targets in strengths.items():
            for target, found in targets.items():
                hits, trials = sum(found["named"]), len(found["named"])
                low, high = binomtest(hits, trials).proportion_ci()
                share = f"{hits} of {trials} [{low:.2f}, {high:.2f}]"
                rows.append([row, strength, target, share])
    write_table(args.output, ["defense, shape", "strength", "the sentence of", "named"], rows)


def name_all(cell: dict, model, texts: list[dict]) -> list[bool]:
    """Whether each trial named the right one."""
    found = []
    for trial in logging.tqdm(range(cell["trials"]), desc=" ".join(map(str, cell["defense"]))):
        order = np.random.default_rng(trial).permutation(len(texts))
        chosen = [texts[i] for i in order[: cell["candidates"] + cell["history"] + 1]]
        candidates, past = chosen[: cell["candidates"]], chosen[cell["candidates"] :]
        maps = [GradientMap(model, batch) for batch in candidates]
        earlier, later = [GradientMap(model, batch) for batch in past[1:]], past[0]
        found.append(names_first(cell, maps, earlier, GradientMap(model, later)))
    return found


def names_first(cell: dict, maps: list, earlier: list, later) -> bool:
    """Whether the first candidate, who is the client's, is named."""

    def client():
        name, settings = cell["defense"]
        return make_defense(name, **settings, **cell["strength"])

    before, known = client(), None
    for gmap in earlier:
        known = before(gmap)
    del known
    state = before.state_dict()

    def message(gmap):
        defense = client()
        defense.load_state_dict(dict(state))
        sent = defense(gmap)
        return sent if cell["target"] == TARGETS[0] else defense(later)

    pruned = "pruning" in cell["defense"][0]
    seen = marks(message(maps[0]), pruned)
    scores = [correlation(seen, expected(message(gmap), gmap, cell, pruned)) for gmap in maps]
    return int(np.argmax(scores)) == 0


def marks(message, pruned: bool) -> Tensor:
    """What the eye sees: log y², or what was kept."""
    flat = torch.cat([tensor.flatten() for tensor in message.values()])
    return (flat != 0).float() if pruned else flat.square().clamp(min=1e-30).log()


def expected(message, gmap, cell: dict, pruned: bool) -> Tensor:
    """What a candidate would have given."""
    if pruned:
        return marks(message, pruned)
    if cell["defense"][0] == "gaussian_noise":  # would there be a shape, then this one
        message = make_defense("optimal_noise", shape="own", relative_scale=1)(gmap)
    flat = torch.cat([tensor.flatten() for tensor in message.noise.added.values()])
    return flat.clamp(min=1e-30).log()


def correlation(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one, other]))[0, 1].nan_to_num(nan=-1.0))


def _said(strength: dict) -> str:
    return ", ".join(f"{key}={value}" for key, value in strength.items())
