"""What does a defense protect that is named, and nothing else?"""

from pathlib import Path
from typing import Any

import torch

from hf_gradguard.audit import audit, summarize

from ..study import Study
from .lib.intervals import share
from .lib.tables import write_table
from .lib.text import load_classifier, load_tokenizer, of_usual_length, sst2

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

    ARGUMENTS: dict[str, Any] = Study.ALL | {
        "--model": "a text encoder and its tokenizer",
        "--data_dir": "folder of train.tsv",
        "--work_dir": {"type": Path, "default": Path("runs/bare_names"), "help": "of the audits"},
    }

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
        torch.manual_seed(0)
        model = load_classifier(self.args.model).eval()
        listed = [(row["sentence"], row["label"]) for row in self.rows[: cell["listed"]]]
        private = listed[cell["first"] : cell["first"] + cell["messages"]]
        folder = self.args.work_dir / f"{cell['defenses'][0]}_from_{cell['first']}"
        result = audit(
            model, self.tokenizer, private, cell["defenses"], [], candidates=listed,
            output=folder, seed=cell["seed"], reference=False, word_pairs=0, estimators="none",
        )  # fmt: skip
        return {
            row.defense: {
                "found": round(row.scores["tpr_1%"].mean * row.members), "of": row.members,
            }
            for row in summarize(result).membership
        }  # fmt: skip

    def report(self, metrics: dict) -> None:
        rows = []
        for blocks in metrics.values():
            for name in next(iter(blocks.values())):
                found, of = (
                    sum(block[name][key] for block in blocks.values()) for key in ("found", "of")
                )
                rows.append([f"`{name}`", f"{found} of {of}", share(found, of).text(2)])
        write_table(self.output, ["name alone", "members found", "95 % interval"], rows)
