r"""Does the shape of noise, or what pruning kept, name the text?

    python -m recipes.studies.shapes.run naming --model MODEL --data_dir SST2 \
        --output docs/results/shapes_naming

An encoder cut to two layers, and one sentence a message. An attacker has 28 sentences of equal
length and label, one of which was the client's: of the message that is looked at, or of the one
before it. They know the defense, the model and all batches before the last two, and so can tell how
each candidate would shape the noise. They look at shapes alone: the candidate is named whose shape
has the largest correlation with log y² over all coordinates (pruning: with what was kept). A blind
guess names 1 of 28. 40 minutes of one core.
"""

from collections.abc import Iterator

import numpy as np
import torch
from scipy.stats import binomtest
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from hf_gradguard import GradientMap, make_defense

from ..lib.tables import write_table
from ..lib.text import batches_of_one, of_usual_length, sst2
from .settings import CANDIDATES, HISTORY, MESSAGES, SENTENCES, STRENGTHS, TARGETS, TRIALS

ARGUMENTS = {"--model": "a BERT and its tokenizer", "--data_dir": "folder of train.tsv"}


def cells(args) -> dict:
    size = {"candidates": 3, "trials": 1, "history": 1} if args.quick else {}
    return {
        (row, target): {
            "defense": defense,
            "strengths": STRENGTHS["pruning" if "pruning" in row else "noise"],
            "target": target,
            "candidates": CANDIDATES,
            "trials": TRIALS,
            "history": HISTORY,
        }
        | size
        for row, defense in MESSAGES.items()
        for target in (TARGETS if "past" in row else TARGETS[:1])
    }


def prepare(args):
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        args.model, num_hidden_layers=2, trust_remote_code=False
    ).eval()
    texts = batches_of_one(tokenizer, of_usual_length(sst2(args.data_dir, "train").take(SENTENCES)))
    lengths = [text["input_ids"].shape[1] for text in texts]
    common = max(set(lengths), key=lengths.count)
    alike = [t for t, n in zip(texts, lengths, strict=True) if n == common and t["labels"] == 1]
    return lambda cell: name_all(cell, model, alike)


def report(figures: dict, args) -> None:
    rows = []
    for row, targets in figures.items():
        for target, strengths in targets.items():
            for strength, named in strengths.items():
                low, high = binomtest(sum(named), len(named)).proportion_ci()
                share = f"{sum(named)} of {len(named)} [{low:.2f}, {high:.2f}]"
                rows.append([row, strength, target, share])
    write_table(args.output, ["defense, shape", "strength", "the sentence of", "named"], rows)


def name_all(cell: dict, model, texts: list[dict]) -> dict[str, list[bool]]:
    """Whether each trial named the right one, by strength."""
    found: dict[str, list[bool]] = {_said(strength): [] for strength in cell["strengths"]}
    for trial in logging.tqdm(range(cell["trials"]), desc=" ".join(map(str, cell["defense"]))):
        order = np.random.default_rng(trial).permutation(len(texts))
        chosen = [texts[i] for i in order[: cell["candidates"] + cell["history"] + 1]]
        candidates, past = chosen[: cell["candidates"]], chosen[cell["candidates"] :]
        own = trial % len(candidates)  # equal scores must not favor the client's
        maps = [GradientMap(model, batch) for batch in candidates]
        earlier, later = [GradientMap(model, batch) for batch in past[1:]], past[0]
        for strength, named in names(cell, maps, own, earlier, GradientMap(model, later)):
            found[strength].append(named)
    return found


def names(cell: dict, maps: list, own: int, earlier: list, later) -> Iterator[tuple[str, bool]]:
    """Whether the candidate who is the client's is named, by strength."""
    pruned = "pruning" in cell["defense"][0]

    def client(strength: dict):
        name, settings = cell["defense"]
        return make_defense(name, **settings, **strength)

    before = client(cell["strengths"][0])
    for gmap in earlier:
        before(gmap)
    state = before.state_dict()

    def message(gmap, strength: dict):
        defense = client(strength)
        defense.load_state_dict(dict(state))
        sent = defense(gmap)
        return sent if cell["target"] == TARGETS[0] else defense(later)

    # Strengths scale a shape, and do not change it.
    shapes = [
        expected(message(gmap, cell["strengths"][0]), gmap, cell["defense"][0]) for gmap in maps
    ]
    for strength in cell["strengths"]:
        seen = marks(message(maps[own], strength), pruned)
        scores = [correlation(seen, shape) for shape in shapes]
        yield _said(strength), int(np.argmax(scores)) == own


def marks(message, pruned: bool) -> Tensor:
    """What the eye sees: log y², or what was kept."""
    flat = torch.cat([tensor.flatten() for tensor in message.values()])
    return (flat != 0).float() if pruned else flat.square().clamp(min=1e-30).log()


def expected(message, gmap, defense: str) -> Tensor:
    """What a candidate would have given."""
    if "pruning" in defense:
        return marks(message, pruned=True)
    if defense == "gaussian_noise":  # were there a shape, then this one
        shaped = make_defense("optimal_noise", shape="own", num_probes=1, relative_scale=1)
        message = shaped(gmap)
    flat = torch.cat([tensor.flatten() for tensor in message.noise.added.values()])
    return flat.clamp(min=1e-30).log()


def correlation(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one, other]))[0, 1].nan_to_num(nan=-1.0))


def _said(strength: dict) -> str:
    return ", ".join(f"{key}={value}" for key, value in strength.items())
