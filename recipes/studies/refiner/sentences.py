r"""Does Refiner do what its equation says, sentence by sentence? What do α and the learning rate
trade, and what does ε do?

    python -m recipes.studies.refiner.run sentences --model MODEL --data_dir SST2 \
        --output docs/results/refiner_sentences

Refines each of the first sentences of SST-2's dev set by itself, with the model as it is before
fine-tuning (a new head, no dropout): how often the utility metric UM fell and the noise ratio D
rose, the cosine of the shared with the true gradient, and the share of words whose nearest token
embedding is still their own. Writes OUTPUT.md and OUTPUT_projection.md. About half an hour of one
core.
"""

import math
import statistics
from pathlib import Path

import torch
from torch.nn.functional import cosine_similarity, normalize
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.defenses.refiner.published import brought_near
from hf_gradguard.randomness import Stream

from ..lib.tables import write_table
from ..lib.text import NETWORK, batches_of_one, sst2
from .federation import flat
from .settings import CURVE, PROJECTION, QUICK_SENTENCES, SENTENCES

ARGUMENTS = {
    "--model": "an encoder",
    "--data_dir": "folder with dev.tsv",
    "--evaluation_network": NETWORK,
}


def cells(args) -> dict:
    counts, fast = (QUICK_SENTENCES, {"iterations": 5}) if args.quick else (SENTENCES, {})
    return {
        (row,): {"strength": strength | fast, "sentences": counts.get(row, counts["others"])}
        for row, strength in ({"defaults": {}} | CURVE | PROJECTION).items()
    }


def prepare(args):
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    model = AutoModelForSequenceClassification.from_pretrained(
        args.model, num_labels=2, trust_remote_code=False
    ).eval()
    data = sst2(args.data_dir)

    def measure(cell: dict) -> dict:
        rows = data.select(range(cell["sentences"]))
        samples = batches_of_one(tokenizer, rows, truncation=True, max_length=64)
        network = {"evaluation_network": args.evaluation_network}
        defense = make_defense("refiner", objective="weighted", **network, **cell["strength"])
        defense.prepare(model, tokenizer)
        return refine_all(model, defense, samples)

    return measure


def refine_all(model: torch.nn.Module, defense, samples: list[dict]) -> dict:
    """Means with 95 % intervals over the sentences; medians where values spread over decades."""
    generator = Stream.from_seeds(0)
    found = [refined(model, defense, sample, generator) for sample in logging.tqdm(samples)]
    result: dict = {"sentences": len(samples)}
    result["fell and rose"] = round(
        statistics.mean(float(one["fell"] and one["rose"]) for one in found), 4
    )
    for name in found[0]:
        values = [float(one[name]) for one in found]
        half = 1.96 * statistics.stdev(values) / math.sqrt(len(values))
        result[name] = {"mean": round(statistics.mean(values), 4), "±": round(half, 4)}
        if name.startswith("metric"):
            result[name]["median"] = round(statistics.median(values), 6)
    return result


def refined(model: torch.nn.Module, defense, sample: dict, generator: Stream) -> dict[str, float]:
    gmap = GradientMap(model, sample)
    found = defense.refine(gmap, generator)
    sent = brought_near(gmap.gradient(), found.gradient, defense.bound(gmap.gradient()))
    true, shared = flat(gmap.gradient()), flat(sent)
    words = ~torch.isin(
        sample["input_ids"][0], torch.tensor(defense.network.config.special_token_ids)
    )
    matrix = normalize(model.get_input_embeddings().weight.detach(), dim=1)
    nearest = (normalize(found.input[0, words], dim=1) @ matrix.T).argmax(1)
    return {
        "fell": found.utility_metric[-1] < found.utility_metric[0],
        "rose": found.noise_ratio[-1] > found.noise_ratio[0],
        "metric_start": found.utility_metric[0],
        "metric_end": found.utility_metric[-1],
        "ratio_start": found.noise_ratio[0],
        "ratio_end": found.noise_ratio[-1],
        "cosine": float(cosine_similarity(true, shared, dim=0)),
        "distance": float((true - shared).norm()),
        "norm": float(true.norm()),
        "same_tokens": float((nearest == sample["input_ids"][0, words]).float().mean()),
    }


def report(figures: dict, args) -> None:
    tables(args.output, figures)


def tables(output: Path, figures: dict) -> None:
    def shown(row: str, name: str, digits: int, unit: float = 1) -> str:
        value = figures[row][name]
        return f"{unit * value['mean']:.{digits}f} ± {unit * value['±']:.{digits}f}"

    last = {
        "alpha": 0.6,
        "learning_rate": f"0.01 (defaults, {figures['defaults']['sentences']} sentences)",
    }
    rows = [
        (
            *settings.values(),
            shown(row, "cosine", 3),
            f"{shown(row, 'same_tokens', 0, 100)} %",
            f"{figures[row]['metric_end']['mean']:.4f}",
            f"{100 * figures[row]['fell']['mean']:.0f} %",
        )
        for row, settings in (CURVE | {"defaults": last}).items()
    ]
    header = ["α", "learning rate", "cosine", "words still nearest", "UM at the end", "UM fell"]
    write_table(output, header, rows)
    rows = [(row, shown(row, "cosine", 4), shown(row, "distance", 3)) for row in PROJECTION]
    write_table(
        output.with_name(f"{output.name}_projection"),
        ["", "cosine", "distance to the true gradient"],
        rows,
    )
