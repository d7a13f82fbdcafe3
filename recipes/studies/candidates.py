"""Which candidate sentences are in a message, behind each defense?"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import make_attack
from hf_gradguard.audit.attackers import attackers
from hf_gradguard.audit.settings import AuditSettings
from hf_gradguard.defenses import Defense
from hf_gradguard.metrics import score_candidates, score_text
from hf_gradguard.metrics.candidates import FALSE_POSITIVES
from hf_gradguard.networks import train_text_network
from hf_gradguard.randomness import Stream

from ..study import Study
from .lib.attacks import observe, token_ids_of
from .lib.defenses import with_own_strength
from .lib.intervals import share
from .lib.results import named
from .lib.tables import bracketed, summary, write_table
from .lib.text import TEXT_FLAGS, batch_of, load_classifier, load_tokenizer, of_usual_length, sst2
from .lib.training import learn

RATIOS = [{"ratio": 0.5}, {"ratio": 0.9}, {"ratio": 0.99}]
NOISE = [{"relative_scale": 1.0}, {"relative_scale": 10.0}, {"relative_scale": 100.0}]
DEFENSES: dict[str, list[dict]] = {
    "none": [{}],
    "gaussian_noise": NOISE,
    "pruning": RATIOS,
    "quantization": [{"bits": 4}, {"bits": 2}, {"sign_only": True}],
    "refiner": [{"alpha": 0.3}, {"alpha": 0.6}, {"alpha": 0.9}],
    "optimal_noise": NOISE,
    "laplace_noise": NOISE,
    "optimal_pruning": RATIOS,
    "soteria": RATIOS,
    "dp_sgd": [{"clip": 1.0, **noise} for noise in NOISE],
    "optimal_dp_sgd": [{"clip": 0.01, **noise} for noise in NOISE],
}
STATES = ("initial", "trained")
PLAN = {"layers": 2, "candidates": 48, "train_steps": 200, "network_steps": 400, "seed": 0}
QUICK = PLAN | {"candidates": 6, "train_steps": 1}
POOL = 1000  # sentences that are kept out of training
ROWS_READ = 6 * POOL  # rows of the training set, for these and for what is trained on


class CandidateStudy(Study):
    """The model, its two states, the sentences and the defenses, each made once."""

    ARGUMENTS: dict[str, Any] = TEXT_FLAGS

    def load(self) -> None:
        torch.set_num_threads(1)
        self.tokenizer = load_tokenizer(self.args.model)
        rows = list(of_usual_length(sst2(self.args.data_dir, "train").take(ROWS_READ)))
        self.pool, self.trained_on = rows[: len(rows) // 4][:POOL], rows[len(rows) // 4 :]
        self.model = functools.cache(self._model)
        self.network = functools.cache(self._network)

    def _model(self, state: str, layers: int, steps: int):
        torch.manual_seed(0)
        model = load_classifier(self.args.model, num_hidden_layers=layers)
        if state == "trained":
            train(model, self.tokenizer, self.trained_on, steps)
        return model.eval()

    def _network(self, layers: int, steps: int):
        embedding = self.model("initial", layers, 0).get_input_embeddings()
        public = [row["sentence"] for row in self.trained_on]
        return train_text_network(embedding, self.tokenizer, public, steps=steps, seed=0)

    def model_of(self, cell: Mapping[str, Any]):
        return self.model(cell["state"], cell["layers"], cell["train_steps"])

    def defense(self, cell: Mapping[str, Any], strength: Mapping[str, Any]) -> Defense:
        network = {}
        if cell["defense"] == "refiner":  # its weighted form
            network = {"evaluation_network": self.network(cell["layers"], cell["network_steps"])}
        defense = make_defense(cell["defense"], **with_own_strength(strength), **network)
        defense.prepare(self.model_of(cell), self.tokenizer)
        return defense

    def candidate_scores(self, cell: Mapping[str, Any], rows: list[dict]) -> dict:
        """Metrics by strength and by who knows the defense: `"ratio=0.9|knows"`."""
        strengths = [(strength, self.defense(cell, strength)) for strength in cell["strengths"]]
        scores: dict[str, list] = {}
        members = []
        for number in range(cell["messages"]):
            candidates, member_indices = draw_candidates(cell, number, rows)
            members.append(member_indices)
            for place, ranked in self._ranked(cell, candidates, member_indices, strengths, number):
                scores.setdefault(place, []).append(ranked)
        return {place: metrics_of(ranked, members) for place, ranked in scores.items()}

    def _ranked(
        self,
        cell: Mapping[str, Any],
        candidates: list,
        member_indices: list,
        strengths: list,
        number: int,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Scores of all candidates: one tensor for each strength, and for an attacker that knows
        the defense or does not.
        """
        model = self.model_of(cell)
        batch = batch_of(self.tokenizer, [candidates[i] for i in member_indices])
        places, observations, gmap = [], [], GradientMap(model, batch)
        for strength, defense in strengths:
            message = defense(gmap, Stream.from_seeds(cell["seed"], number))
            mechanism = defense.mechanism(message)
            attackers = {} if mechanism is None else {"knows": mechanism}
            if not (attackers and cell.get("informed")):
                attackers["does not"] = None
            for knows, granted in attackers.items():
                places.append(f"{strength_text(strength)}|{knows}")
                grants = {"tokenizer": self.tokenizer, "mechanism": granted}
                observations.append(observe(model, batch, message, **grants))
        texts, labels = ([row[key] for row in candidates] for key in ("sentence", "label"))
        attack = make_attack("candidates", candidates=texts, labels=labels)
        results = attack.reconstruct_many(observations, torch.Generator().manual_seed(number))
        yield from zip(places, [result.scores for result in results], strict=True)


def train(model, tokenizer, rows: list[dict], steps: int) -> None:
    """As one plain client would. The word embeddings stay, as they do in a federation."""
    model.train()
    model.get_input_embeddings().requires_grad_(False)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-4)
    draw = np.random.default_rng(0)
    for _ in range(steps):
        batch = batch_of(tokenizer, [rows[i] for i in draw.integers(len(rows), size=16)])
        learn(model, optimizer, batch)
    model.get_input_embeddings().requires_grad_(True)


def model_after(name: str, tokenizer, rows: list[dict], steps: int) -> torch.nn.Module:
    """A classifier that one plain client trained on these rows. It shares no word embeddings."""
    torch.manual_seed(0)
    model = load_classifier(name)
    if steps:
        train(model, tokenizer, rows, steps)
    model.get_input_embeddings().requires_grad_(False)
    return model.eval()


def strength_text(strength: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in strength.items())


def draw_candidates(
    cell: Mapping[str, Any], number: int, rows: list[dict]
) -> tuple[list[dict], list[int]]:
    """The candidates of a message, and which of them are in it."""
    draw = np.random.default_rng([cell["seed"], cell["size"], number])
    candidates = [rows[i] for i in draw.permutation(len(rows))[: cell["candidates"]]]
    return candidates, sorted(draw.permutation(len(candidates))[: cell["size"]].tolist())


def metrics_of(scores: list, members: list) -> dict:
    """Means over members with 95 % intervals over messages."""
    ranked = score_candidates([message.numpy() for message in scores], members)
    shown = {
        name: [round(float(x), 4) for x in (ranked.mean[name], *ranked.interval[name])]
        for name in ("top1", "rank", *FALSE_POSITIVES)
    }
    return shown | {"area": round(ranked.area, 4), "members": sum(map(len, members))}


class FortyEight(CandidateStudy):
    """Which of 48 sentences are in a message of 1, 4 or 16 of SST-2?

    Conditions and figures: docs/findings/membership.md.
    """

    QUICK_DEFENSES = ("none", "gaussian_noise", "optimal_noise", "pruning", "quantization")
    MESSAGES = {1: 6, 16: 2, 4: 3}  # messages of so many sentences

    def cells(self) -> dict:
        """Refiner's last, which ask for an evaluation network."""
        plan = QUICK if self.quick else PLAN
        cells = {
            (defense, state, str(size)): {
                "defense": defense, "strengths": DEFENSES[defense], "state": state, "size": size,
                "messages": 1 if self.quick else messages, **plan,
            }
            for size, messages in self.MESSAGES.items()
            for state in STATES
            for defense in (self.QUICK_DEFENSES if self.quick else DEFENSES)
            if not self.quick or (size == 1 and state == "initial")
        }  # fmt: skip
        return dict(sorted(cells.items(), key=lambda pair: pair[0][0] == "refiner"))

    def measure(self, cell: dict) -> dict:
        return self.candidate_scores(cell, self.pool)

    def report(self, metrics: dict) -> None:
        rows = []
        columns = [
            (state, str(size))
            for state in STATES
            for size in sorted(self.MESSAGES)
            if any(str(size) in states.get(state, {}) for states in metrics.values())
        ]
        for defense, states in metrics.items():
            messages = [cell for sizes in states.values() for cell in sizes.values()]
            for key in dict.fromkeys(key for cell in messages for key in cell):
                strength, knows = key.split("|")
                row = [f"`{defense}`", f"`{strength}`" if strength else ""]
                row.append({"knows": "yes", "does not": "no"}[knows])
                for state, size in columns:
                    cell = states.get(state, {}).get(size, {}).get(key)
                    row.append(cell_text(cell, int(size)) if cell else "")
                rows.append(row)
        titles = [f"{state} model, messages of {size}" for state, size in columns]
        write_table(self.output, ["defense", "strength", "defense known", *titles], rows)


def cell_text(cell: dict, size: int) -> str:
    """Named, mean rank, and TPR at 1 % FPR. Where all messages are alike, a bootstrap has no width:
    the interval is that of so many messages then.
    """
    top, low, high = cell["top1"]
    if low == high and top in (0, 1):
        messages = cell["members"] // size
        top, low, high = share(int(top) * messages, messages)
    top, low, high = (100 * value for value in (top, low, high))
    ends = f" [{low:.0f}, {high:.0f}]" if low == low else ""
    return f"{top:.0f} %{ends}, {cell['rank'][0]:.1f}, {100 * cell['tpr_1%'][0]:.0f} %"


class Thousand(CandidateStudy):
    """Which of 1,000 sentences are in a message, and what reconstruction attacks find in it without
    a list.

    Conditions and figures: docs/findings/membership.md.
    """

    ARGUMENTS = CandidateStudy.ARGUMENTS | Study.ALL
    DEFENSES = DEFENSES | {
        "gradient_sketch": [{"min_batches": 1}],  # which sends a first message
        "refiner": [{"alpha": 0.3}, {"alpha": 0.9}],
    }
    FIRST_SHOWN = ("none", "gaussian_noise", "optimal_noise", "pruning", "optimal_pruning",
             "quantization")  # fmt: skip
    MESSAGES = {16: 1, 1: 3, 4: 1}
    RECONSTRUCTIONS: dict[str, dict] = {
        "span": {},
        "tag": {"steps": 500},
        "lamp": {"steps": 300, "every": 100, "moves": 20},
    }

    def cells(self) -> dict:
        skips_attacks = self.quick and not self.args.all
        return self.published(self.listed() | ({} if skips_attacks else self.reconstructed()))

    @property
    def plan(self) -> dict:
        return QUICK if self.quick else PLAN | {"candidates": POOL}

    @property
    def groups(self) -> list:
        """Defenses, in the order of the tables; of quick runs the first ones."""
        shown_later = [name for name in self.DEFENSES if name not in self.FIRST_SHOWN]
        return [self.FIRST_SHOWN] if self.quick else [self.FIRST_SHOWN, shown_later]

    def listed(self) -> dict:
        """One cell for all strengths, which share the candidates' gradients."""
        return {
            (state, defense, f"list, {size}"): {
                "defense": defense, "strengths": self.DEFENSES[defense], "state": state,
                "size": size, "messages": messages, "informed": True, **self.plan,
            }
            for names in self.groups
            for size, messages in ({1: 1} if self.quick else self.MESSAGES).items()
            for state in reversed(STATES)
            for defense in names
        }  # fmt: skip

    def reconstructed(self) -> dict:
        return {
            (state, defense, f"{attack} {strength_text(strength)}"): {
                "defense": defense, "strength": strength, "attack": attack,
                "settings": settings | ({"steps": 1} if self.quick and settings else {}),
                "state": state, "size": 1, "messages": 1 if self.quick else 3, **self.plan,
            }
            for state in reversed(STATES)
            for attack, settings in self.RECONSTRUCTIONS.items()
            for defense in (self.FIRST_SHOWN[:2] if self.quick else self.DEFENSES)
            for strength in self.DEFENSES[defense]
        }  # fmt: skip

    def load(self) -> None:
        super().load()
        if not self.quick:  # sentences behind those
            rows = sst2(self.args.data_dir, "train").skip(ROWS_READ).take(ROWS_READ)
            self.pool = of_usual_length(rows)[:POOL]

    def measure(self, cell: dict) -> dict:
        """Of a reconstruction attack, that knows the defense and has no list, token F1."""
        if "attack" not in cell:
            return self.candidate_scores(cell, self.pool)
        defense, model = self.defense(cell, cell["strength"]), self.model_of(cell)
        plain = make_attack(cell["attack"], **cell["settings"])
        *_, attacker = attackers(cell["attack"], plain, defense, AuditSettings()).values()
        recovered, truth = [], []
        for number in range(cell["messages"]):
            candidates, member_indices = draw_candidates(cell, number, self.pool)
            batch = batch_of(self.tokenizer, [candidates[i] for i in member_indices])
            message = defense(GradientMap(model, batch), Stream.from_seeds(cell["seed"], number))
            noise = message.noise if "noise_variance" in attacker.grants else None
            variance = None if noise is None else noise.added
            grants = {"tokenizer": self.tokenizer, "noise_variance": variance}
            observation = observe(model, batch, message, **grants)
            recovered.append(token_ids_of(attacker.attack, observation, number))
            truth.append(batch["input_ids"].tolist())
        return summary(score_text(recovered, truth, tokenizer=self.tokenizer), ["token_f1"])

    def report(self, metrics: dict) -> None:
        """A table for each state of the model."""
        sizes, attacks = sorted(self.MESSAGES), self.RECONSTRUCTIONS
        header = ["defense", "strength"]
        header += [*(f"candidates, message of {size}" for size in sizes), *attacks]
        for state, defenses in metrics.items():
            rows = []
            for defense, cells in defenses.items():
                for strength in map(strength_text, self.DEFENSES[defense]):
                    row = [f"`{defense}`", f"`{strength}`" if strength else ""]
                    row += [shares_text(cells.get(f"list, {size}", {}), strength) for size in sizes]
                    for attack in attacks:
                        cell = cells.get(f"{attack} {strength}")
                        row.append(bracketed(cell["token_f1"], ".2f") if cell else "")
                    rows.append(row)
            write_table(named(self.output, f"_{state}"), header, rows)


def shares_text(cells: Mapping[str, dict], strength: str) -> str:
    """Named, mean rank, and TPR at 1 % and 0.1 % FPR."""
    cell = cells.get(f"{strength}|knows") or cells.get(f"{strength}|does not")
    if not cell:
        return ""
    top, percent, tenth = (f"{100 * cell[name][0]:.0f}" for name in ("top1", "tpr_1%", "tpr_0.1%"))
    return f"{top} %, {cell['rank'][0]:.1f}, {percent} %, {tenth} %"
