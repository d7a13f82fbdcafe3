r"""Which of 48 sentences are in a message of 1, 4 or 16 of SST-2?

    python -m recipes.studies.candidates.run text --model MODEL --data_dir SST2 \
        --output docs/results/candidates

MiniLM cut to two layers, with a random head, and after 200 steps of plain training (AdamW, rate
2e-4, batches of 16). Candidates are sentences of the training set of 8 to 20 words that the model
was not trained on, with their labels; members are drawn from them. Attackers know the labels. Those
who know the defense rank by likelihood, the others by cosine or distance. Each row has three
strengths, and the same draws in each. An hour of one core.
"""

from ..lib.intervals import share
from ..lib.tables import write_table
from .settings import DEFENSES, MESSAGES, PLAN, QUICK, QUICK_DEFENSES, STATES
from .task import Task, measured

ARGUMENTS = {
    "--model": "a text encoder and its tokenizer",
    "--data_dir": "folder of train.tsv",
}
WHO = {"knows": "yes", "does not": "no"}


def cells(args) -> dict:
    """Refiner's last, which ask for an evaluation network."""
    plan = QUICK if args.quick else PLAN
    found = {
        (defense, state, str(size)): {
            "defense": defense,
            "strengths": DEFENSES[defense],
            "state": state,
            "size": size,
            "messages": 1 if args.quick else messages,
            **plan,
        }
        for size, messages in MESSAGES.items()
        for state in STATES
        for defense in (QUICK_DEFENSES if args.quick else DEFENSES)
        if not args.quick or (size == 1 and state == "initial")
    }
    return dict(sorted(found.items(), key=lambda one: one[0][0] == "refiner"))


def prepare(args):
    task = Task(args)
    return lambda cell: measured(task, cell, task.kept)


def report(figures: dict, args) -> None:
    rows = []
    columns = [
        (state, str(size))
        for state in STATES
        for size in sorted(MESSAGES)
        if any(str(size) in states.get(state, {}) for states in figures.values())
    ]
    for defense, states in figures.items():
        keys = dict.fromkeys(k for sizes in states.values() for one in sizes.values() for k in one)
        for key in keys:
            strength, knows = key.split("|")
            row = [f"`{defense}`", f"`{strength}`" if strength else "", WHO[knows]]
            for state, size in columns:
                one = states.get(state, {}).get(size, {}).get(key)
                row.append(_shown(one, int(size)) if one else "")
            rows.append(row)
    named = [f"{state} model, messages of {size}" for state, size in columns]
    write_table(args.output, ["defense", "strength", "who knows it", *named], rows)


def _shown(one: dict, size: int) -> str:
    """Named, mean rank, and found at 1 % false alarms. Where all messages are alike, a bootstrap
    has no width: the interval is that of so many messages then.
    """
    top, low, high = one["top1"]
    if low == high and top in (0, 1):
        messages = one["members"] // size
        top, low, high = share(int(top) * messages, messages)
    top, low, high = (100 * value for value in (top, low, high))
    ends = f" [{low:.0f}, {high:.0f}]" if low == low else ""
    return f"{top:.0f} %{ends}, {one['rank'][0]:.1f}, {100 * one['tpr_1%'][0]:.0f} %"
