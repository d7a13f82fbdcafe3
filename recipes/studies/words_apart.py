"""Which of two sentences that differ in one word is a message of?"""

import functools
from typing import Any

import torch

from hf_gradguard import make_defense
from hf_gradguard.audit import word_distinguishability
from hf_gradguard.randomness import Stream

from ..study import Study
from .candidates import model_after
from .lib.intervals import Interval
from .lib.tables import write_table
from .lib.text import TEXT_FLAGS, load_tokenizer, of_usual_length, sst2

STAGES = {"start": 0, "after 200 steps": 200}
PLAN = {"texts": 20, "pairs": 2, "batch_size": 1, "seed": 0}
QUICK = PLAN | {"texts": 1, "pairs": 1}
NO_FEEDBACK: dict[str, Any] = {"error_feedback": False, "min_batches": 1}
DEFENSES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    **{
        f"gaussian_noise, {ratio:g} times": ("gaussian_noise", {"relative_scale": ratio})
        for ratio in (20.0, 100.0, 1000.0, 10_000.0)
    },
    "laplace_noise, 20 times": ("laplace_noise", {"relative_scale": 20.0}),
    "optimal_noise, 20 times": ("optimal_noise", {"relative_scale": 20.0}),
    "pruning, 0.99": ("pruning", {"ratio": 0.99}),
    "quantization, 1 bit": ("quantization", {"bits": 1}),
    "gradient_sketch, no feedback": ("gradient_sketch", NO_FEEDBACK),
    **{
        f"dp_sgd by samples, σ {sigma:g}": (
            "dp_sgd", {"per_sample": True, "clip": 1.0, "noise_multiplier": sigma}
        )
        for sigma in (0.5, 1.5, 5.0)
    },
}  # fmt: skip


class WordsApart(Study):
    """Of a sentence and the same with one word replaced by a random one, a coin decides which is
    sent, alone. The attacker knows both, the label and the defense, and takes the likelier.

    Half is chance. Every pair has a message of its own, so that exact intervals hold.
    """

    ARGUMENTS: dict[str, Any] = Study.ALL | TEXT_FLAGS

    def cells(self) -> dict:
        names = ["none", "gaussian_noise, 20 times"] if self.quick else list(DEFENSES)
        return self.published(
            {
                (label, stage): {"defense": label, "settings": DEFENSES[label][1], "steps": steps}
                | (QUICK if self.quick else PLAN)
                for stage, steps in STAGES.items()
                if not (self.quick and steps)
                for label in names
            }
        )

    def load(self) -> None:
        torch.set_num_threads(1)
        self.tokenizer = load_tokenizer(self.args.model)
        self.rows = list(of_usual_length(sst2(self.args.data_dir, "train").take(6000)))
        others = self.rows[PLAN["texts"] :]
        self.model_after = functools.cache(
            functools.partial(model_after, self.args.model, self.tokenizer, others)
        )

    def measure(self, cell: dict) -> dict:
        rows = self.rows[: cell["texts"]]
        model = self.model_after(cell["steps"])
        defense = make_defense(DEFENSES[cell["defense"]][0], **cell["settings"])
        defense.prepare(model, self.tokenizer)
        found = word_distinguishability(
            model, self.tokenizer, [row["sentence"] for row in rows],
            [row["label"] for row in rows], defense, cell["pairs"],
            batch_size=cell["batch_size"], generator=Stream.from_seeds(cell["seed"]),
        )  # fmt: skip
        low, high = found.interval
        return {
            "correct": found.correct, "pairs": found.pairs, "low": round(low, 4),
            "high": round(high, 4), "change": round(found.relative_change, 4),
            "ratio": round(min(found.direction_ratio, 1e6), 3),
        }  # fmt: skip

    def report(self, metrics: dict) -> None:
        header = ["defense", *(f"told apart, {stage}" for stage in STAGES), "deviations, at either"]
        rows = []
        for label, stages in metrics.items():
            row, deviations = [label], []
            for stage in STAGES:
                cell = stages.get(stage)
                if cell is None:
                    row.append("")
                    continue
                rate = Interval(cell["correct"] / cell["pairs"], cell["low"], cell["high"])
                row.append(f"{cell['correct']:g} of {cell['pairs']}: {rate.text(2)}")
                product = cell["change"] * cell["ratio"]
                deviations.append("exact" if cell["ratio"] >= 1e6 else f"{product:.2g}")
            rows.append([*row, ", ".join(deviations)])
        write_table(self.output, header, rows)
