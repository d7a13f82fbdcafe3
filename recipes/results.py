"""Everything that docs/findings shows, made anew by one command a row.

    MODEL=... SST2=... MNIST=... python recipes/results.py     all of it: three days of one core
    MODEL=... SST2=... python recipes/results.py span_attack   one run, or all that mention this
    python recipes/results.py --tables                         tables of what is there
    python recipes/results.py --list                           the runs, and their hours

Studies go on with what is missing; benchmarks measure anew. `$NAMES` are read from the environment:
docs/results.md says what they are.
"""

import argparse
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Run(NamedTuple):
    """One run.

    Args:
        output: Its files are `docs/results/OUTPUT.*`.
        module: The study, or the benchmark, below `recipes`.
        part: Of the study, with what chooses among its tables.
        data: Arguments that name data and models.
        hours: Roughly, of one core, where nothing is there yet.
        environment: Set for this run.
    """

    output: str
    module: str
    part: str
    data: str
    hours: float
    environment: str = ""

    @property
    def command(self) -> str:
        """What is run, in the repository's root."""
        words = [self.environment, f"python -m recipes.{self.module}", self.part, self.data]
        return " ".join([*filter(None, words), f"--output docs/results/{self.output}"])

    def make_tables(self, folder: Path) -> None:
        """Tables and pictures anew, of FOLDER/OUTPUT.json, in this process."""
        sys.argv = [self.module, *self.part.split(), "--tables"]
        sys.argv += ["--output", str(folder / self.output)]
        runpy.run_module(f"recipes.{self.module}", run_name="__main__")


UNDEFENDED = "studies.attacks_undefended.run"
HIDING = "studies.hiding_and_learning.run"
EVERY = "studies.every_defense.run"
OPTIMAL = "studies.optimal_defenses.run"
SHAPES = "studies.shapes.run"
CANDIDATES = "studies.candidates.run"
REFINER = "studies.refiner.run"
LABELS = "studies.labels.run"
UPDATES = "studies.updates.run"
RECEIVED = "studies.received.run"
LEAKAGE = "studies.leakage.run"
NETWORKS = "studies.evaluation_networks.run"
TEXT = "--model $MODEL --data_dir $SST2"
IMAGES = "--mnist $MNIST --cifar10 $CIFAR10_LOSSLESS"
TRAINED = "--train $CIFAR10_TRAIN --test $CIFAR10_TEST"
ATTACKED = "--images $CIFAR10_LOSSLESS --evaluation_network $NETWORK"
FEDERATION = f"{TRAINED} {ATTACKED}"
PREDICTS = f"{IMAGES} --sst2 $SST2 --tokenizer $MODEL"
ALLOCATOR = (
    "MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TOP_PAD_=500000000"
)
NETWORK = (  # what $NETWORK names, if it is not there
    "python -m recipes.studies.evaluation_networks.train image --data $TINY_IMAGENET "
    "--filters 32 64 128 --output $NETWORK"
)
FRONTIER = "studies.frontier.run"
KEPT = "--models $MODELS"
RUNS = [
    Run("undefended_images", UNDEFENDED, "images", IMAGES, 0.5),
    Run("undefended_batches", UNDEFENDED, "batches", "--cifar10 $CIFAR10_LOSSLESS", 0.5),
    Run("undefended_deep_prior", UNDEFENDED, "deep_prior", "--cifar10 $CIFAR10_LOSSLESS", 0.3),
    Run("undefended_text", UNDEFENDED, "text", TEXT, 0.5),
    Run("undefended_lora", UNDEFENDED, "lora", "--tokenizer $MODEL", 0.1),
    Run("undefended_families", UNDEFENDED, "families", "--tokenizer $MODEL", 8),
    Run("undefended_lengths", UNDEFENDED, "lengths", "--tokenizer $MODEL", 0.2),
    Run("span_attack", HIDING, "span", TEXT, 1),
    Run("sst2", HIDING, "accuracy", TEXT, 6),
    Run("sst2_seconds", HIDING, "accuracy --seconds", TEXT, 0.1),
    Run("hiding_and_learning", HIDING, "picture", "", 0),
    Run("text_defenses", EVERY, "text", "--tokenizer $MODEL --data_dir $SST2", 4),
    Run("image_defenses", EVERY, "images", ATTACKED, 4),
    Run("knowing", EVERY, "knowing", "", 0),
    Run("speed", "benchmarks.defenses", "", "--model $MODEL", 0.1),
    Run("randomness_speed", "benchmarks.randomness", "", "--model $MODEL", 0.05),
    Run("memory", "benchmarks.memory", "", "--model $MODEL", 0.1),
    Run("mesh_memory", "benchmarks.mesh", "", "--model $MODEL", 0.1),
    Run("refiner_speed", "benchmarks.refiner", "", "--model $MODEL", 0.1),
    Run("exchange_cost", "benchmarks.exchange", "", "--model $MODEL", 0.1),
    Run("optimal_defenses_training", OPTIMAL, "training", "--data $MNIST", 0.6),
    Run("optimal_defenses_mnist", OPTIMAL, "attacked mnist", "--data $MNIST", 0.5),
    Run("optimal_defenses_cifar10", OPTIMAL, "attacked cifar10", "--data $CIFAR10_LOSSLESS", 3),
    Run("shapes_quality", SHAPES, "quality", f"{TEXT} --cifar10 $CIFAR10_LOSSLESS", 1),
    Run("shapes_estimates", SHAPES, "estimates", TEXT, 0.3),
    Run("shapes_adam", SHAPES, "adam", TEXT, 0.3),
    Run("candidates", CANDIDATES, "text", TEXT, 1),
    Run("candidates_thousand", CANDIDATES, "thousand", TEXT, 1.5),
    Run("shapes_naming", SHAPES, "naming", TEXT, 0.7),
    Run("frontier_rates", FRONTIER, "rates", TEXT, 0.6),
    Run("frontier_text", FRONTIER, "text", f"{TEXT} {KEPT}", 0.6),
    Run("frontier_lists", FRONTIER, "lists", f"{TEXT} {KEPT}", 0.2),
    Run("frontier_partly", FRONTIER, "partly", f"{TEXT} {KEPT}", 0.3),
    Run(
        "frontier_corpora",
        FRONTIER,
        "corpora",
        f"{TEXT} --text $DATA/wikitext2/test.txt {KEPT}",
        0.4,
    ),
    Run("frontier_batches", FRONTIER, "batches", TEXT, 0.5),
    Run(
        "frontier_heads",
        FRONTIER,
        "heads",
        f"{TEXT} --public $DATA/wikitext2/train.txt {KEPT}",
        1,
    ),
    Run("frontier_images", FRONTIER, "images", f"{TRAINED} --images $CIFAR10_LOSSLESS {KEPT}", 1),
    Run(
        "frontier_image_heads",
        FRONTIER,
        "image_heads",
        f"{TRAINED} --images $CIFAR10_LOSSLESS --public $TINY_IMAGENET {KEPT}",
        1.5,
    ),
    Run(
        "frontier_elsewhere",
        FRONTIER,
        "elsewhere",
        f"{TRAINED} --images $CIFAR10_LOSSLESS --mnist $MNIST --tiny_imagenet $TINY_IMAGENET "
        f"{KEPT}",
        2,
    ),
    Run("members", "studies.members.run", "weights", f"{TRAINED} {KEPT}", 0.4),
    Run("private_accuracy", "studies.private.run", "accuracy", TEXT, 0.4),
    Run("refiner_sentences", REFINER, "sentences", TEXT, 0.5),
    Run("refiner_parts", REFINER, "parts", f"{TEXT} {KEPT}", 4),
    Run(
        "refiner_warm",
        REFINER,
        "warm",
        f"--test $CIFAR10_TEST --images $CIFAR10_LOSSLESS {KEPT}",
        1.5,
    ),
    Run("refiner_in_training", REFINER, "in_training", TEXT, 0.25),
    Run("refiner_ablations", REFINER, "ablations", FEDERATION, 6),
    Run("refiner_frontier", REFINER, "frontier", FEDERATION, 9),
    Run("refiner_text", REFINER, "text", TEXT, 1),
    Run("refiner_fine_tuned", REFINER, "fine_tuned", f"{TEXT} {KEPT}", 2),
    Run("refiner_pruning", REFINER, "pruning", TRAINED, 1),
    Run("refiner_layers", REFINER, "layers", TRAINED, 1),
    Run("updates_words", UPDATES, "words", TEXT, 0.2),
    Run("updates_images", UPDATES, "images", "--cifar10 $CIFAR10_LOSSLESS", 0.3),
    Run("updates_rounds", UPDATES, "rounds", f"--cifar10 $CIFAR10_LOSSLESS {TEXT}", 0.5),
    Run("labels", LABELS, "recovery", "--data $MNIST", 0.5),
    Run("received_malicious", RECEIVED, "malicious", "--cifar10 $CIFAR10_LOSSLESS", 0.1),
    Run("received_alarms", RECEIVED, "alarms", "--model $MODEL", 0.2),
    Run("evalnets", NETWORKS, "figures", "--data $DATA --model $MODEL --cards model_cards", 0.2),
    Run("fil_logistic_mnist", LEAKAGE, "logistic", "--data $MNIST", 0.2),
    Run("fil_networks", LEAKAGE, "private_networks", IMAGES, 0.6),
    Run("influence_predicts_attacks", LEAKAGE, "predicts_attacks", PREDICTS, 1),
    Run("influence_directions", LEAKAGE, "directions", IMAGES, 0.5),
    Run("influence_unfairness", LEAKAGE, "unfairness", "--mnist $MNIST", 0.25),
    Run("influence_initializations", LEAKAGE, "initializations", IMAGES, 0.5),
    Run("influence_epochs", LEAKAGE, "epochs", f"{IMAGES} --train $CIFAR10_TRAIN", 0.3),
    Run("leakage_speed", "benchmarks.leakage", "", "--model $MODEL", 0.2),
    Run("private_sgd", "benchmarks.private_sgd", "", "--model $MODEL", 0.1),
    Run("models_speed", "benchmarks.models", "", "--model $MODEL", 0.2),
    Run("training_speed", "benchmarks.training", "", TEXT, 0.2),
    Run("meter_speed", "benchmarks.meter", "", "--model $MODEL", 0.2),
    Run("attack_speed", "benchmarks.attacks", "", "--model $MODEL", 0.2),
    Run("attack_speed_kept", "benchmarks.attacks", "", "--model $MODEL", 0.2, ALLOCATOR),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="*", help="outputs, or parts of commands")
    parser.add_argument("--tables", action="store_true", help="compute nothing")
    parser.add_argument("--list", action="store_true", help="run nothing")
    args = parser.parse_args()
    chosen = named(args.only)
    if args.list:
        print("\n".join(f"{run.hours:5g} h  {run.command}" for run in chosen))
        return
    if args.tables:
        sys.path.insert(0, str(ROOT))
        for run in chosen:
            run.make_tables(ROOT / "docs" / "results")
        return
    commands = [run.command for run in chosen]
    if any("$NETWORK" in command for command in commands):
        commands.insert(0, f"[ -e $NETWORK ] || {NETWORK}")
    execute(commands)


def named(parts: list[str]) -> list[Run]:
    """Runs of these outputs; or, where there is no such output, whose commands mention a part."""
    outputs = {run.output for run in RUNS}
    return [
        run
        for run in RUNS
        if not parts
        or any(run.output == part if part in outputs else part in run.command for part in parts)
    ]


def execute(commands: list[str], root: Path = ROOT) -> None:
    """Runs them one after the other, in bash."""
    wanted = set(re.findall(r"\$(\w+)", " ".join(commands)))
    if missing := sorted(name for name in wanted if name not in os.environ):
        sys.exit(
            f"Set {', '.join(missing)} in the environment: docs/results.md says what they are."
        )
    for command in commands:
        print(f"\n{command}")
        subprocess.run(["bash", "-ec", command], cwd=root, check=True)


if __name__ == "__main__":
    main()
