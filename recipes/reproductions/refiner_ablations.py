"""Refiner's ablations on CIFAR-10 with the leakage papers' LeNet: what each setting costs and what
it hides.

    python recipes/train_evalnets.py image --data tinyimagenet32_10k_2k.npz --filters 32 64 128 \
        --output NETWORK
    python recipes/reproductions/refiner_ablations.py --train TRAIN.parquet --test TEST.parquet \
        --images LOSSLESS.npz --evaluation_network NETWORK --output docs/results/refiner_ablations

After Tables 5 to 8 and 10 and Appendix J of the Refiner paper (2025), in the federation of
federation.py: PMM with 95 % t-intervals over seeds (rows of ε, and 20 iterations: one seed), PSNR
with those over images.
"""

from federation import FULL, QUICK, Federation, federation_parser, pmm
from reporting import Results, interval, write_table

from hf_gradguard import make_defense

BASE = {"alpha": 0.5}  # the paper's; beta 1, tau 0.95, ten iterations
ROWS: dict[str, dict] = {
    "none": {},
    **{f"alpha={a}": {"alpha": a} for a in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)},
    **{f"tau={t}": BASE | {"tau": t} for t in (0.91, 0.93, 0.97, 1.0)},
    "element_wise=False": BASE | {"element_wise": False},
    **{f"epsilon={e}": BASE | {"epsilon": e} for e in (0.05, 0.1, 1.0)},
    **{f"beta={b}": BASE | {"beta": b} for b in (0.001, 0.1, 10.0, 1000.0)},
    **{f"iterations={i}": BASE | {"iterations": i} for i in (5, 20)},
}
ONE_SEED = (
    "epsilon",
    "iterations=20",
)  # what the rows of ε show is their PSNR; twenty iterations take their time
PAPER = {  # PMM and PSNR of Tables 5 to 8 and 10
    "none": (100, ""), "alpha=0.0": (98.52, 21.24), "alpha=0.1": (95.45, 16.52), "alpha=0.3": (92.61, 14.99),
    "alpha=0.5": (90.69, 13.20), "alpha=0.7": (90.08, 12.53), "alpha=0.9": (89.34, 10.52), "tau=0.91": (90.98, 12.93),
    "tau=0.93": (90.82, 13.05), "tau=0.97": (90.46, 13.25), "tau=1.0": (89.28, 15.44), "element_wise=False": (85.32, 13.15),
    "beta=0.001": (91.93, 13.89), "beta=0.1": (91.06, 13.44), "beta=10.0": (90.00, 13.08), "beta=1000.0": (88.90, 12.04),
    "iterations=5": (85.61, 13.05), "iterations=20": (92.17, 13.45),
}  # fmt: skip


def main() -> None:
    args = federation_parser(__doc__).parse_args()
    rows = dict(list(ROWS.items())[::6]) if args.quick else ROWS
    plan = {"rows": rows} | (QUICK if args.quick else FULL)
    results, federation = Results(args.output, plan), Federation(args, plan)
    for row, settings in rows.items():
        defense = (
            make_defense("none")
            if row == "none"
            else make_defense("refiner", **settings, **federation.network)
        )
        results.get((row, "attack"), federation.attack, defense)
        for seed in range(1 if row.startswith(ONE_SEED) else plan["seeds"]):
            results.get((row, "accuracy", str(seed)), federation.accuracy, defense, seed)
    header = [
        "",
        "PMM",
        "accuracy",
        "PSNR",
        "cosine",
        "distance to the true gradient",
        "paper: PMM",
        "paper: PSNR",
    ]
    write_table(args.output, header, table(results.figures))


def table(figures: dict) -> list[list[object]]:
    rows: list[list[object]] = []
    for row, found in figures.items():
        learned, attacked = found["accuracy"], found["attack"]
        cells = [interval(pmm(learned, figures["none"]["accuracy"]), 0)]
        cells += [
            interval([100 * one for one in learned.values()], 1),
            interval(attacked["psnr"], 1),
        ]
        cells += [f"{attacked['cosine']:.3f}", f"{attacked['distance']:.2f}"]
        rows.append([row, *cells, *PAPER.get(row, ("", ""))])
    return rows


if __name__ == "__main__":
    main()
