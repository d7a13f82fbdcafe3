"""What does each defense cost on SST-2, and leave to attackers, each at its own best learning rate?

`frontier_rates` comes first; `frontier_text` reads what it chose; `frontier_lists`,
`frontier_corpora` and `frontier_partly` take what that trained. `frontier_batches` trains nothing.
"""

import itertools
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation
from hf_gradguard.defenses.mechanism import Mechanism
from hf_gradguard.gradient_map.parameters import shared_parameters
from hf_gradguard.randomness import Stream

from ..study import Study
from . import frontier_attacks as attacks
from . import frontier_clients as clients
from . import frontier_rows as plan
from . import frontier_tables as tables
from .lib.attacks import observe
from .lib.defenses import with_own_strength
from .lib.results import Results, named
from .lib.tables import write_table
from .lib.text import batch_of, of_usual_length, sst2
from .rate_search import best_rates, cells_by_rate, rates_so_far, rates_to_try


class Rates(Study):
    """The learning rate of each defense at each strength, chosen on a held-out part of SST-2's
    training set.

    Conditions and figures: docs/findings/text.md.
    """

    ARGUMENTS = clients.TEXT_FLAGS | Study.ALL

    def cells(self) -> dict:
        """Those of the start, and those that they ask for next."""
        results, cells = Results(self.output), {}
        for defense, strength in plan.QUICK_ROWS if self.quick else plan.ROWS:
            sizes = plan.QUICK if self.quick else plan.SIZES
            common = {"defense": defense, "strength": strength, "seed": plan.RATES_SEED, **sizes}
            rates = rates_to_try(strength, 0 if self.quick else plan.SPREAD)
            if not self.quick:
                rates = rates_so_far(results, common, rates)
            row, search = clients.row_of(defense, strength), cells_by_rate(common, rates)
            cells |= {(row, rate): cell for rate, cell in search.items()}
        return self.published(cells)

    def load(self) -> None:
        self.task = clients.TextTask(self.args.model, self.args.data_dir)

    def measure(self, cell: dict) -> dict:
        return self.task.on_held_out(cell)

    def report(self, metrics: dict) -> None:
        best, grid = best_rates(metrics), [f"{rate:g}" for rate in plan.GRID]
        rows = [
            [f"`{row}`", f"{best[row]:g}"]
            + [f"{rates[rate]['held_out']:.3f}" if rate in rates else "" for rate in grid]
            for row, rates in metrics.items()
        ]
        write_table(self.output, ["", "chosen", *grid], rows)


class TextStudy(Study):
    """Sentences of SST-2, and trainings on them."""

    ARGUMENTS: dict[str, Any] = clients.TEXT_FLAGS | plan.FOLDER
    RATES: dict[str, Any] = {"--rates": {"default": "frontier_rates", "help": "beside OUTPUT"}}

    def load(self) -> None:
        self.task = clients.TextTask(
            self.args.model, self.args.data_dir, getattr(self.args, "models", None)
        )
        self.texts = of_usual_length(sst2(self.args.data_dir))

    def stage(self, cell: dict) -> clients.Stage:
        return self.task.stage(cell, cell["stage"])

    def rates(self) -> dict[str, float]:
        """The rates of rows whose search has ended."""
        output = self.output.with_name(self.args.rates)
        results, searches = Results(output), {}
        if not named(output, ".json").exists():
            raise SystemExit(f"{results.path} is not there: run frontier_rates first.")
        args = type(self.args)(**vars(self.args) | {"output": output, "all": False})
        for (row, rate), cell in Rates(args).cells().items():
            searches.setdefault(row, {})[rate] = results.get(cell)
        return best_rates({row: r for row, r in searches.items() if None not in r.values()})


class Texts(TextStudy):
    """Accuracy on SST-2 of each defense at its own best learning rate, and what attackers recover
    at the start, in the middle and at the end of its own training.

    Conditions and figures: docs/findings/text.md.
    """

    ARGUMENTS = TextStudy.ARGUMENTS | TextStudy.RATES | Study.ALL
    PAIRS = [
        ("gaussian_noise relative_scale=100", "optimal_noise relative_scale=100"),
        (
            "optimal_pruning ratio=0.9 error_feedback=True min_batches=8",
            "optimal_pruning ratio=0.9 error_feedback=True",
        ),
        (
            "optimal_pruning ratio=0.99 error_feedback=True min_batches=8",
            "optimal_pruning ratio=0.99 error_feedback=True",
        ),
    ]
    LOOK = tables.Look(
        "token_f1",
        "words that the best of the quick attacks recovers at any stage (token F1)",
        -7,
    )
    LISTS = tables.Look(
        tables.TPR,
        "TPR at 1 % FPR of members of messages of 16, at any stage (candidate set)",
        -7,
    )

    def cells(self) -> dict:
        if self.quick:
            stages = plan.at_all_stages(plan.QUICK_ATTACKS)
            settings = (stages, plan.QUICK_ATTACKS, plan.QUICK, None)
            return tables.fitting(tables.cells_of(plan.QUICK_ROWS, 1, *settings))
        stages, rates, cells = plan.at_all_stages(plan.ATTACKS), self.rates(), {}
        settings = (plan.ATTACKS, plan.SIZES, rates)
        rows = tables.cells_of(plan.ROWS, plan.SEEDS, stages, *settings)
        for place, cell in tables.fitting(rows).items():
            cells[place] = cell
            if place[0] == "none" and cell.get("attack") == "tag":
                # What it makes of noise alone at that model
                cells[attacks.CHANCE, *place[1:]] = cell | {attacks.NOISE_ALONE: True}
        cells |= tables.cells_of(plan.MORE_SEEDED_ROWS, plan.MORE_SEEDS, {}, *settings)
        return self.published(cells)

    def measure(self, cell: dict) -> dict:
        if "attack" not in cell:
            return self.task.learned(cell)
        later_batches = self.task.later_batches()
        return attacks.attack_texts(
            cell, self.stage(cell), self.task.tokenizer, self.texts, later_batches
        )

    def report(self, metrics: dict) -> None:
        tables.write_frontier(metrics, plan.ATTACKS, self.output, {})
        tables.write_lists(metrics, plan.ATTACKS, self.output)
        tables.write_pairs(metrics, self.PAIRS, self.output)
        tables.picture(metrics, self.output, self.LOOK)
        messages_of_several = f", {(plan.QUICK_CANDIDATES if self.quick else plan.CANDIDATES)[1]}, "
        lists = {
            row: {place: runs for place, runs in cells.items()
                  if place == tables.ACCURACY or messages_of_several in place}
            for row, cells in metrics.items()
        }  # fmt: skip
        tables.picture(lists, named(self.output, "_lists"), self.LISTS)


def candidates_at_the_end(quick: bool) -> dict:
    """A cell of the candidate-set attacker, at the end of the first seed's training."""
    attack, plans = (
        (plan.QUICK_CANDIDATES, plan.QUICK_ATTACKS) if quick else (plan.CANDIDATES, plan.ATTACKS)
    )
    cell = tables.attack_cell(attack, *plans[attack], "end")
    return cell | (plan.QUICK if quick else plan.SIZES) | {"seed": 0}


class Lists(TextStudy):
    """How much noise hides which candidates are in a message?

    Conditions and figures: docs/findings/membership.md.
    """

    STRENGTHS = (20.0, 100.0, 300.0, 1000.0, 3000.0)
    TRAINED = {"defense": "gaussian_noise", "strength": {"relative_scale": 20.0},
               "learning_rate": 8e-4}  # fmt: skip

    def cells(self) -> dict:
        common = candidates_at_the_end(self.quick)
        strengths = self.STRENGTHS[: 1 if self.quick else None]
        return {(f"{s:g}",): common | {"relative_scale": s} for s in strengths}

    def measure(self, cell: dict) -> dict:
        trained = self.TRAINED | {k: cell[k] for k in ("seed", "steps", "batch", "stage")}
        model = self.stage(trained).model
        defense = make_defense(
            "gaussian_noise", relative_scale=cell["relative_scale"], strength="own"
        )
        metrics = attacks.attack_texts(
            cell, clients.Stage(model, defense), self.task.tokenizer, self.texts
        )
        return metrics | {"parameters": sum(p.numel() for p in shared_parameters(model).values())}

    def report(self, metrics: dict) -> None:
        _, size = plan.QUICK_CANDIDATES if self.quick else plan.CANDIDATES
        rows = []
        for strength, cell in metrics.items():
            spread = math.sqrt(cell["parameters"] / size) / float(strength)
            rank = f"{statistics.median(cell['rank']):g}"
            rows.append([strength, f"{spread:.2g}", tables.score_text({"0": cell}), rank])
        header = ["noise over gradient", "spread", "TPR at 1 % FPR (candidate set)", "rank, median"]
        write_table(self.output, header, rows)


class Partly(TextStudy):
    """Where a list has only some of a message's sentences: are those told?

    Conditions and figures: docs/findings/membership.md.
    """

    ARGUMENTS = TextStudy.ARGUMENTS | TextStudy.RATES
    ROWS: list[plan.Row] = [
        plan.NONE, *plan.noises(20.0)[:1], *plan.prunings("pruning", 0.99),
        *plan.prunings("optimal_pruning", 0.99, error_feedback=True),
    ]  # fmt: skip

    def cells(self) -> dict:
        common = candidates_at_the_end(self.quick)
        rows, counts = (self.ROWS[:1], (4, 2)) if self.quick else (self.ROWS, (16, 8, 2))
        rates = {} if self.quick else self.rates()
        return {
            (clients.row_of(*row), str(listed)): common
            | {"defense": row[0], "strength": row[1], "members": listed}
            | {"learning_rate": rates.get(clients.row_of(*row), 2e-4)}
            for listed in counts
            for row in rows
        }

    def measure(self, cell: dict) -> dict:
        size, listed, texts = cell["size"], cell["members"], self.texts
        observations = attacks.observe_texts(cell, self.stage(cell), self.task.tokenizer, texts)
        starts = range(0, size * len(observations), size)
        members = [text for start in starts for text in texts[start : start + listed]]
        candidates = (members + texts[size * len(observations) :])[: cell["settings"]["listed"]]
        return attacks.rank_members(
            cell | {"size": listed}, *attacks.sentences_and_labels(candidates), observations
        )

    def report(self, metrics: dict) -> None:
        rows = [
            [f"`{row}`", *(f"{tables.score_text({'0': cell})}, {statistics.median(cell['rank']):g}"
                           for cell in cells.values())]
            for row, cells in metrics.items()
        ]  # fmt: skip
        header = [f"{n} among the candidates" for n in next(iter(metrics.values()))]
        write_table(self.output, ["TPR at 1 % FPR, rank", *header], rows)


class Corpora(TextStudy):
    """Do settings that were found on SST-2 hide sentences of another kind?

    Conditions and figures: docs/findings/membership.md.
    """

    ARGUMENTS = TextStudy.ARGUMENTS | TextStudy.RATES | {
        "--text": "WikiText-2's test part, a paragraph a line"
    }  # fmt: skip
    ROWS: list[plan.Row] = [
        plan.NONE,
        *plan.noises(20.0),
        *plan.sketches(4, 16),
        *plan.sketches(4, min_batches=8),
    ]

    def cells(self) -> dict:
        if self.quick:
            stages = {attack: ["end"] for attack in plan.QUICK_ATTACKS}
            settings = (stages, plan.QUICK_ATTACKS, plan.QUICK, None)
            cells = tables.fitting(tables.cells_of(self.ROWS[:1], 1, *settings))
        else:
            stages = {plan.SPAN: list(plan.STAGES), plan.CANDIDATES: ["end"]}
            settings = (stages, plan.ATTACKS, plan.SIZES, self.rates())
            cells = tables.cells_of(self.ROWS, 1, *settings)
        corpus = {"corpus": "WikiText-2"}
        return {
            place: cell | corpus for place, cell in cells.items() if place[1] != tables.ACCURACY
        }

    def load(self) -> None:
        super().load()
        pairs = zip(usual_sentences(self.args.text), itertools.cycle((0, 1)), strict=False)
        self.texts = [{"sentence": sentence, "label": label} for sentence, label in pairs]

    def measure(self, cell: dict) -> dict:
        return attacks.attack_texts(cell, self.stage(cell), self.task.tokenizer, self.texts)

    def report(self, metrics: dict) -> None:
        places = list(dict.fromkeys(place for cells in metrics.values() for place in cells))
        rows = [
            [f"`{row}`", *(tables.score_text(cells.get(place, {})) for place in places)]
            for row, cells in metrics.items()
        ]
        write_table(self.output, ["", *places], rows)


def sentences_in(path: str | Path) -> Iterator[str]:
    """Those of a tokenized text, without titles and unknown words."""
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if not line.strip().startswith("="):
            for sentence in re.split(r"(?<= [.?!]) ", line.strip()):
                if sentence and "<unk>" not in sentence:
                    yield sentence


def usual_sentences(path: str | Path) -> list[str]:
    """Those of usual length."""
    return [row["sentence"] for row in of_usual_length({"sentence": s} for s in sentences_in(path))]


class Batches(TextStudy):
    """How many batches must an entry hold before a pruning with error feedback sends it?

    Conditions and figures: docs/findings/text.md.
    """

    ARGUMENTS = clients.TEXT_FLAGS

    def cells(self) -> dict:
        counts, size, messages = ((1, 2), 2, 1) if self.quick else ((1, 2, 4, 8, 16), plan.BATCH, 3)
        return {
            (name, str(count)): {
                "defense": name, "strength": {"ratio": 0.99, "error_feedback": True},
                "min_batches": count, "size": size, "messages": messages, "listed": 300, "seed": 0,
            }
            for count in counts
            for name in ("optimal_pruning", "pruning")
        }  # fmt: skip

    def load(self) -> None:
        super().load()
        self.model = self.task.start(0).eval()

    def measure(self, cell: dict) -> dict:
        size, count, messages = cell["size"], cell["min_batches"], cell["messages"]
        starts = range(0, size * (count + messages - 1), size)
        batches = [self.texts[start : start + size] for start in starts]
        other_texts = self.texts[size * len(batches) :]
        observations = [
            self.first_message(cell, batches[number : number + count]) for number in range(messages)
        ]
        lasts = [text for batch_texts in batches[count - 1 :] for text in batch_texts]
        candidates = (lasts + other_texts)[: cell["listed"]]
        rankings = [
            self.ranking(cell, candidates, [pair[ranking] for pair in observations], size)
            for ranking in range(2)
        ]
        all_batches_texts = [text for batch_texts in batches[:count] for text in batch_texts]
        candidates = (all_batches_texts + other_texts)[
            : max(cell["listed"], len(all_batches_texts) + 1)
        ]
        ranking_of_all = self.ranking(
            cell, candidates, [observations[0][1]], len(all_batches_texts)
        )
        return max(rankings, key=lambda ranking: sum(ranking["tpr_1%"])) | {
            "all": ranking_of_all["tpr_1%"]
        }

    def first_message(self, cell: dict, batches: Sequence[list[dict]]) -> list[Observation]:
        """A client's first message that is not empty, as the two ways have it."""
        model, tokenizer = self.model, self.task.tokenizer
        defense = make_defense(
            cell["defense"], **with_own_strength(cell["strength"]), min_batches=cell["min_batches"]
        )
        defense.prepare(model, tokenizer)
        longest = 0
        for number, batch_texts in enumerate(batches):
            batch = batch_of(tokenizer, batch_texts)
            message = defense(GradientMap(model, batch), Stream.from_seeds(cell["seed"], number))
            longest = max(longest, batch["input_ids"].shape[1])
        mechanism = defense.mechanism(message)
        as_sum = observe(model, batch, message, tokenizer=tokenizer, mechanism=mechanism)
        mean = {name: y / len(batches) for name, y in message.items()}
        selection = "largest" if cell["defense"] == "pruning" else "chosen"
        labels = torch.tensor([text["label"] for batch_texts in batches for text in batch_texts])
        large = {"gradient": mean, "input_shape": (len(labels), longest), "labels": labels}
        return [as_sum, replace(as_sum, **large, mechanism=Mechanism(selection=selection))]

    def ranking(self, cell: dict, candidates: list, observations: list, size: int) -> dict:
        cell = cell | {"attack": "candidates", "size": size}
        return attacks.rank_members(cell, *attacks.sentences_and_labels(candidates), observations)

    def report(self, metrics: dict) -> None:
        rows = [
            [f"`{name}`", count, tables.score_text({"0": cell}),
             f"{statistics.median(cell['rank']):g}", tables.values_text([cell["all"]], "tpr_1%")]
            for name, cells in metrics.items()
            for count, cell in cells.items()
        ]  # fmt: skip
        header = ["0.99, feedback", "batches in an entry"]
        header += ["TPR at 1 % FPR, last batch alone among candidates", "rank, median"]
        write_table(self.output, [*header, "TPR at 1 % FPR, all batches among candidates"], rows)
