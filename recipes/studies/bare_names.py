"""What does a defense protect that is named, and nothing else?"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hf_gradguard.audit import Summary, audit, summarize

from ..study import Study
from .lib.intervals import share
from .lib.tables import write_table
from .lib.text import TEXT_FLAGS, load_classifier, load_tokenizer, of_usual_length, sst2

NAMES = (
    "none", "gaussian_noise", "laplace_noise", "optimal_noise", "dp_sgd", "optimal_dp_sgd",
    "pruning", "optimal_pruning", "quantization", "soteria",
)  # fmt: skip
AS_PUBLISHED = ("optimal_noise_published", "optimal_pruning_published", "optimal_dp_sgd_published")
SLOW = ("gradient_sketch", "refiner", "refiner_published")  # minutes for a message
LISTED, BLOCK, BLOCKS = 200, 5, 2


class BareNames(Study):
    """Defenses by their names alone, one text per message. The attacker has a list of 200 texts
    with all messages' among them, knows the defense and the label.

    Members found are those that fit better than 99 % of the listed texts that are not in their
    message (TPR at 1 % FPR).
    """

    WORK_DIR = {"type": Path, "default": Path("runs/bare_names"), "help": "of the audits"}
    ARGUMENTS: dict[str, Any] = Study.ALL | TEXT_FLAGS | {"--work_dir": WORK_DIR}

    def cells(self) -> dict:
        """One for each block of messages: those of one audit."""
        if self.quick:
            return {("noise", "0"): self._cell(["none", "gaussian_noise"], 0, 1, 4)}
        groups = {"usual": NAMES, "as published": AS_PUBLISHED} | {name: (name,) for name in SLOW}
        return self.published(
            {
                (group, str(n)): self._cell(list(names), n * BLOCK, BLOCK, LISTED)
                for group, names in groups.items()
                for n in range(BLOCKS)
            }
        )

    def _cell(self, names: list[str], first: int, messages: int, listed: int) -> dict:
        return {
            "defenses": names, "first": first, "messages": messages, "listed": listed, "seed": 0,
        }  # fmt: skip

    def load(self) -> None:
        torch.set_num_threads(1)
        self.tokenizer = load_tokenizer(self.args.model)
        self.rows = list(of_usual_length(sst2(self.args.data_dir, "train").take(6000)))

    def measure(self, cell: dict) -> dict[str, dict]:
        """A group at once: the candidates' gradients are the same for all of its defenses."""
        listed = [(row["sentence"], row["label"]) for row in self.rows[: cell["listed"]]]
        summary = self.attacked(cell, listed, [], candidates=listed)
        return {
            row.defense: {
                "found": round(row.scores["tpr_1%"].mean * row.members), "of": row.members,
            }
            for row in summary.membership
        }  # fmt: skip

    def attacked(self, cell: dict, rows: list, attacks: list[str], **settings: Any) -> Summary:
        """The audit of a cell's messages, one of these rows in each."""
        torch.manual_seed(0)
        model = load_classifier(self.args.model).eval()
        private = rows[cell["first"] : cell["first"] + cell["messages"]]
        folder = self.args.work_dir / "_".join([cell["defenses"][0], str(cell["first"]), *attacks])
        result = audit(
            model, self.tokenizer, private, cell["defenses"], attacks, output=folder,
            seed=cell["seed"], reference=False, word_pairs=0, estimators="none", **settings,
        )  # fmt: skip
        return summarize(result)

    def report(self, metrics: dict) -> None:
        rows = []
        for blocks in metrics.values():
            for name in next(iter(blocks.values())):
                found, of = (
                    sum(block[name][key] for block in blocks.values()) for key in ("found", "of")
                )
                rows.append([f"`{name}`", f"{found} of {of}", share(found, of).text(2)])
        write_table(self.output, ["name alone", "members found", "95 % interval"], rows)


class Words(BareNames):
    """What span reconstructs of the same ten texts, behind defenses whose messages take seconds: by
    their names alone, one text per message.
    """

    NAMES = ("gradient_sketch", "refiner", "refiner_published")

    def cells(self) -> dict:
        names = self.NAMES[:1] if self.quick else self.NAMES
        messages = 2 if self.quick else BLOCK * BLOCKS
        return {(name, "0"): self._cell([name], 0, messages, messages) for name in names}

    def measure(self, cell: dict) -> dict[str, float]:
        rows = [(row["sentence"], row["label"]) for row in self.rows[: cell["listed"]]]
        summary = self.attacked(cell, rows, ["span"])
        (row,) = summary.reconstructions(cell["defenses"][0])
        over_chance = row.over_chance
        assert over_chance is not None
        return asdict(row.scores["token_f1"]) | {"over_chance": asdict(over_chance)}

    def report(self, metrics: dict) -> None:
        rows = []
        for name, cells in metrics.items():
            figures = cells["0"]
            values = [figures, figures["over_chance"]]
            shown = [f"{v['mean']:.2f} [{v['low']:.2f}, {v['high']:.2f}]" for v in values]
            rows.append([f"`{name}`", *shown])
        write_table(self.output, ["name alone", "token F1", "more than other texts have"], rows)
