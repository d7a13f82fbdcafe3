r"""How much noise hides who is in a message from somebody with a list of candidates?

    python -m recipes.studies.frontier.run lists --model MODEL --data_dir SST2 --models FOLDER \
        --output docs/results/frontier_lists

The encoder after 200 steps under uniform noise of twenty times the gradient, as the part text
trained it (FOLDER keeps it, or it is trained anew), and messages of 16 sentences of the dev set
under noise of other strengths. Candidates are 300 sentences, ranked by likelihood, labels known.
`spread` is √(d/B)/r: by how many standard deviations of the noise one of B members moves a message
of d parameters, if gradients of all are equally large and at right angles. Two minutes of one core
a strength.
"""

import math
import statistics

from hf_gradguard import make_defense
from hf_gradguard.gradient_map.parameters import shared_parameters

from ..lib.tables import write_table
from ..lib.text import of_usual_length, sst2
from .attackers import attacked
from .client import Stage
from .settings import ATTACKS, BATCH, CANDIDATES, QUICK, QUICK_ATTACKS, QUICK_CANDIDATES, STEPS
from .shown import asked, read
from .training import TEXTS, Task

ARGUMENTS = TEXTS | {"--models": "folder that keeps what was trained"}
RATE, TRAINED = 8e-4, 20.0
STRENGTHS = (20.0, 100.0, 300.0, 1000.0, 3000.0)


def cells(args) -> dict:
    common = at_the_end(args.quick)
    return {
        (f"{strength:g}",): common | {"relative_scale": strength}
        for strength in STRENGTHS[: 1 if args.quick else None]
    }


def at_the_end(quick: bool) -> dict:
    """Who has a list, at the end of the first seed's training."""
    attack, attacks = (QUICK_CANDIDATES, QUICK_ATTACKS) if quick else (CANDIDATES, ATTACKS)
    sizes = QUICK if quick else {"steps": STEPS, "batch": BATCH}
    return asked(attack, *attacks[attack], "end") | sizes | {"seed": 0}


def prepare(args):
    task = Task(args.model, args.data_dir, args.models)
    texts = of_usual_length(sst2(args.data_dir))

    def measure(cell: dict) -> dict:
        trained = {
            "defense": "gaussian_noise", "strength": {"relative_scale": TRAINED},
            "learning_rate": RATE, **{k: cell[k] for k in ("seed", "steps", "batch")},
        }  # fmt: skip
        model = task.stage(trained, cell["stage"]).model
        defense = make_defense("gaussian_noise", relative_scale=cell["relative_scale"])
        found = attacked(cell, Stage(model, defense), task.tokenizer, texts)
        return found | {"parameters": sum(p.numel() for p in shared_parameters(model).values())}

    return measure


def report(figures: dict, args) -> None:
    _, size = QUICK_CANDIDATES if args.quick else CANDIDATES
    rows = [
        [
            strength,
            f"{math.sqrt(one['parameters'] / size) / float(strength):.2g}",
            read({"0": one}),
            f"{statistics.median(one['rank']):g}",
        ]
        for strength, one in figures.items()
    ]
    header = ["noise over gradient", "spread", "told at 1 % false alarms", "rank, median"]
    write_table(args.output, header, rows)
