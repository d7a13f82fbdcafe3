"""Everything that docs/findings shows, made anew by one command a row.

    MODEL=... SST2=... MNIST=... python recipes/results.py     all of it: three days of one core
    MODEL=... SST2=... python recipes/results.py span_attack   one run, or all that mention this
    python recipes/results.py --tables                         tables of what is there
    python recipes/results.py --list                           the runs, and their hours

Studies go on with what is missing; benchmarks measure anew. `$NAMES` are read from the environment:
docs/results.md says what they are.
"""

import argparse
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Run(NamedTuple):
    """One published table, with what makes it.

    Args:
        output: Its files are `docs/results/OUTPUT.*`.
        target: The study, as `module:Class` below `recipes.studies`; or the benchmark's module.
        data: Arguments that name data and models.
        hours: Roughly, of one core, where nothing is there yet; of the frontiers on texts and
            images, of five rows.
        environment: Set for this run.
    """

    output: str
    target: str
    data: str
    hours: float
    environment: str = ""

    @property
    def command(self) -> str:
        """What is run, in the repository's root."""
        words = [self.environment, f"python -m recipes {self.output}", self.data]
        return " ".join([*filter(None, words), f"--output docs/results/{self.output}"])

    def run_here(self, argv: list[str]) -> None:
        """Runs it in this process."""
        module, _, name = self.target.partition(":")
        if name:
            study = importlib.import_module(f"recipes.studies.{module}")
            getattr(study, name).parse(argv).run()
        else:
            importlib.import_module("recipes.benchmarks.measuring").run(module, argv)

    def make_tables(self, folder: Path) -> None:
        """Tables and pictures anew, of FOLDER/OUTPUT.json."""
        self.run_here(["--tables", "--output", str(folder / self.output)])


TEXT = "--model $MODEL --data_dir $SST2"
MPNET = "--model $MPNET --data_dir $SST2"
MODEL, TOKENIZER, STORED = "--model $MODEL", "--tokenizer $MODEL", "--models $MODELS"
LOSSLESS, WIKI, CARDS = "$CIFAR10_LOSSLESS", "$DATA/wikitext2", "--cards model_cards"
CIFAR10 = f"--cifar10 {LOSSLESS}"
IMAGES = f"--mnist $MNIST {CIFAR10}"
TEST = "--test $CIFAR10_TEST"
TRAINED = f"--train $CIFAR10_TRAIN {TEST}"
ATTACKED = f"--images {LOSSLESS} --evaluation_network $NETWORK"
FRONTIER = f"{TRAINED} --images {LOSSLESS} {STORED}"
ELSEWHERE = "--mnist $MNIST --tiny_imagenet $TINY_IMAGENET"
PREDICTS = f"{IMAGES} --sst2 $SST2 {TOKENIZER}"
EYE = "--efficientnet $EFFICIENTNET"
PICTURES = f"--images {LOSSLESS} {EYE}"
ALLOCATOR = (
    "MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TOP_PAD_=500000000"
)
EXACT = (  # rows since noise is exact
    "none gaussian_noise optimal_noise gradient_sketch "
    "'dp_sgd, per_sample=True, clip=1.0, noise_multiplier=1.0'"
)
NETWORK = (  # what $NETWORK names, if it is not there
    "python -m recipes.studies.train_evaluation_network image --data $TINY_IMAGENET "
    "--filters 32 64 128 --output $NETWORK"
)
RUNS = [
    Run("undefended_images", "undefended_images:Images", IMAGES, 0.5),
    Run("undefended_batches", "undefended_images:Batches", CIFAR10, 0.5),
    Run("undefended_deep_prior", "undefended_images:DeepPrior", CIFAR10, 0.3),
    Run("undefended_text", "undefended_texts:Sentences", TEXT, 0.5),
    Run("undefended_lora", "undefended_texts:Lora", TOKENIZER, 0.1),
    Run("undefended_families", "undefended_texts:Families", TOKENIZER, 8),
    Run("undefended_lengths", "undefended_texts:Lengths", TOKENIZER, 0.2),
    Run("span_attack", "privacy_and_utility:SpanAttack", TEXT, 1),
    Run("likelihood_search", "likelihood_search:LikelihoodSearches", TEXT, 0.2),
    Run("sst2", "privacy_and_utility:Accuracy", TEXT, 6),
    Run("sst2_seconds", "privacy_and_utility:Seconds", TEXT, 0.1),
    Run("hiding_and_learning", "privacy_and_utility:PrivacyAndUtility", "", 0),
    Run("text_defenses", "every_defense:Texts", f"{TOKENIZER} --data_dir $SST2", 4),
    Run("image_defenses", "every_defense:Images", ATTACKED, 4),
    Run("knowing", "every_defense:Knowing", "", 0),
    Run("speed", "defenses", MODEL, 0.1),
    Run("randomness_speed", "randomness", MODEL, 0.05),
    Run("exact_noise", "exact_noise", MODEL, 0.1),
    Run("noise_speed", "noise", MODEL, 0.05),
    Run("candidates_speed", "candidates", MODEL, 0.1),
    Run("kinks_speed", "kinks", MODEL, 0.1),
    Run("memory", "memory", MODEL, 0.1),
    Run("mesh_memory", "mesh", MODEL, 0.1),
    Run("growth_speed", "growth", MODEL, 0.1),
    Run("mesh_equality", "shards", MODEL, 0.05),
    Run("refiner_speed", "refiner", MODEL, 0.1),
    Run("refiner_seconds", "refiner_seconds:Seconds", f"--images {LOSSLESS}", 0.1),
    Run("exchange_cost", "exchange", MODEL, 0.1),
    Run("wire", "wire", MODEL, 0.05),
    Run("optimal_defenses_training", "optimal_defenses:Training", "--data $MNIST", 0.6),
    Run("optimal_defenses_mnist", "optimal_defenses:AttackedMnist", "--data $MNIST", 0.5),
    Run("optimal_defenses_cifar10", "optimal_defenses:AttackedCifar10", f"--data {LOSSLESS}", 3),
    Run("optimal_defenses_losses", "optimal_defenses:Losses", f"--data {LOSSLESS}", 0.1),
    Run("optimal_defenses_noise", "optimal_defenses:LargerNoise", f"--data {LOSSLESS}", 0.4),
    Run("shapes_quality", "shapes:Quality", f"{TEXT} {CIFAR10}", 1),
    Run("shapes_estimates", "shapes:Estimates", TEXT, 0.3),
    Run("shapes_adam", "shapes_adam:Adam", TEXT, 0.3),
    Run("candidates", "candidates:FortyEight", TEXT, 1),
    Run("candidates_thousand", "candidates:Thousand", TEXT, 1.5),
    Run("shapes_naming", "shapes:Naming", TEXT, 0.7),
    Run("frontier_rates", "frontier_texts:Rates", TEXT, 0.6),
    Run("frontier_text", "frontier_texts:Texts", f"{TEXT} {STORED}", 0.6),
    Run("frontier_lists", "frontier_texts:Lists", f"{TEXT} {STORED}", 0.2),
    Run("frontier_partly", "frontier_texts:Partly", f"{TEXT} {STORED}", 0.3),
    Run(
        "frontier_corpora", "frontier_texts:Corpora", f"{TEXT} --text {WIKI}/test.txt {STORED}", 0.4
    ),
    Run("frontier_batches", "frontier_texts:Batches", TEXT, 0.5),
    Run("words_apart", "words_apart:WordsApart", TEXT, 0.5),
    Run("attributes", "attributes:Attributes", TEXT, 1),
    Run("learned_inversion", "learned_inversion:LearnedInversion", TEXT, 1),
    Run("bare_names", "bare_names:BareNames", TEXT, 0.5),
    Run("bare_names_words", "bare_names:Words", TEXT, 0.2),
    Run("frontier_heads", "frontier_heads:Texts", f"{TEXT} --public {WIKI}/train.txt {STORED}", 1),
    Run(
        "correlated_heads",
        "correlated_heads:Texts",
        f"{TEXT} --public {WIKI}/train.txt {STORED}",
        1,
    ),
    Run(
        "many_clients",
        "many_clients:ManyClients",
        f"{TEXT} --public {WIKI}/train.txt {STORED}",
        1,
    ),
    Run("whole_models", "whole_models:WholeModels", f"{TEXT} {STORED}", 2),
    Run("correlated_models", "whole_models:Parts", TEXT, 2.5),
    Run(
        "correlated_heads_mpnet",
        "correlated_heads:TextsOfMPNet",
        f"{MPNET} --public {WIKI}/train.txt --models $MODELS/mpnet",
        1,
    ),
    Run("whole_models_mpnet", "whole_models:WholeMPNet", f"{MPNET} --models $MODELS/mpnet", 2.5),
    Run(
        "correlated_bodies",
        "correlated_bodies:Bodies",
        f"{TEXT} --public {WIKI}/train.txt {STORED}",
        1.5,
    ),
    Run(
        "correlated_heads_choice",
        "correlated_heads:Choice",
        f"{TEXT} --public {WIKI}/train.txt {STORED}",
        0.3,
    ),
    Run(
        "correlated_heads_images",
        "correlated_heads:Images",
        f"{TRAINED} --public $TINY_IMAGENET {STORED}",
        0.3,
    ),
    Run(
        "correlated_heads_efficientnet",
        "correlated_heads:ImagesByEfficientNet",
        f"{TRAINED} --public $TINY_IMAGENET --network $EFFICIENTNET {STORED}",
        1.5,
    ),
    Run(
        "default_rates",
        "default_rates:DefaultRates",
        f"{TEXT} {STORED} {TRAINED} --wikitext {WIKI} {ELSEWHERE} {CIFAR10}",
        1,
    ),
    Run(
        "encoder_choice",
        "encoder_choice:EncoderChoice",
        f"{TEXT} --mpnet $MPNET --network $EFFICIENTNET {STORED} {TRAINED} --wikitext {WIKI} "
        f"{ELSEWHERE}",
        0.7,
    ),
    Run("frontier_images", "frontier_images:Images", FRONTIER, 1),
    Run(
        "frontier_image_heads", "frontier_heads:Images", f"{FRONTIER} --public $TINY_IMAGENET", 1.5
    ),
    Run("frontier_elsewhere", "frontier_images:Elsewhere", f"{FRONTIER} {ELSEWHERE}", 2),
    Run(
        "learning_rates",
        "learning_rates:LearningRates",
        f"{TEXT} {TRAINED} {STORED} {ELSEWHERE}",
        2,
    ),
    Run("recommendations", "recommendations:Recommendations", "", 0.1),
    Run(
        "recommend_runs",
        "recommend_runs:RecommendRuns",
        f"{TEXT} --encoder $MPNET {STORED} --wikitext {WIKI} {ELSEWHERE}",
        1.5,
    ),
    Run("members", "members:Members", f"{TRAINED} {STORED}", 0.4),
    Run("row_rounding", "row_rounding:RowRounding", "", 0.1),
    Run("accountant", "accountant:Accountant", "", 0.1),
    Run("private_accuracy", "private_accuracy:Accuracy", TEXT, 0.4),
    Run("refiner_sentences", "refiner_texts:Sentences", TEXT, 0.5),
    Run("refiner_parts", "refiner_parts:RefinerParts", f"{TEXT} {STORED}", 4),
    Run("refiner_warm", "refiner_parts:Warm", f"{TEST} --images {LOSSLESS} {STORED}", 1.5),
    Run("refiner_in_training", "refiner_texts:InTraining", TEXT, 0.25),
    Run("refiner_ablations", "refiner_federation:Ablations", f"{TRAINED} {ATTACKED}", 6),
    Run("refiner_frontier", "refiner_federation:Frontier", f"{TRAINED} {ATTACKED}", 9),
    Run("refiner_text", "refiner_texts:Texts", TEXT, 1),
    Run("refiner_fine_tuned", "refiner_texts:FineTuned", f"{TEXT} {STORED}", 2),
    Run("refiner_pruning", "refiner_gradients:Pruning", TRAINED, 1),
    Run("refiner_layers", "refiner_gradients:Layers", TRAINED, 1),
    Run("refiner_recovered", "refiner_pictures:Recovered", PICTURES, 0.2),
    Run("refiner_thresholds", "refiner_pictures:Thresholds", PICTURES, 0.1),
    Run("refiner_importance", "refiner_gradients:Importance", TRAINED, 0.2),
    Run("updates_words", "updates:Words", TEXT, 0.2),
    Run("updates_images", "updates:Images", CIFAR10, 0.3),
    Run("updates_rounds", "updates:Rounds", f"{CIFAR10} {TEXT}", 0.5),
    Run("labels", "labels:Labels", "--data $MNIST", 0.5),
    Run("received_malicious", "received:Malicious", CIFAR10, 0.1),
    Run("received_alarms", "received:Alarms", MODEL, 0.2),
    Run("evalnets", "evaluation_networks:EvaluationNetworks", f"--data $DATA {MODEL} {CARDS}", 0.2),
    Run("fil_logistic_mnist", "fil_logistic:Logistic", "--data $MNIST", 0.2),
    Run("fil_networks", "fil_networks:Networks", IMAGES, 0.6),
    Run("influence_predicts_attacks", "influence:PredictsAttacks", PREDICTS, 1),
    Run("influence_directions", "influence:Directions", IMAGES, 0.5),
    Run("influence_small_directions", "influence:SmallDirections", CIFAR10, 0.1),
    Run("influence_unfairness", "influence_epochs:Unfairness", "--mnist $MNIST", 0.25),
    Run("influence_initializations", "influence:Initializations", IMAGES, 0.5),
    Run("influence_epochs", "influence_epochs:Epochs", f"{IMAGES} --train $CIFAR10_TRAIN", 0.3),
    Run("influence_scores", "influence_more:Scores", f"{PREDICTS} {EYE}", 0.5),
    Run("influence_damping", "influence_more:Damping", "--mnist $MNIST", 0.1),
    Run("influence_resnet", "influence_more:ResNetDirections", CIFAR10, 0.1),
    Run("influence_classes", "influence_more:ResNetUnfairness", CIFAR10, 0.1),
    Run("leakage_speed", "leakage", MODEL, 0.2),
    Run("private_sgd", "private_sgd", MODEL, 0.1),
    Run("models_speed", "models", MODEL, 0.2),
    Run("training_speed", "training", TEXT, 0.2),
    Run("training_exact", "training", f"{TEXT} --rows {EXACT}", 0.2),
    Run("meter_speed", "meter", MODEL, 0.2),
    Run("attack_speed", "attacks", MODEL, 0.2),
    Run("attack_speed_kept", "attacks", MODEL, 0.2, ALLOCATOR),
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


def named(words: list[str]) -> list[Run]:
    """Runs of these outputs; or, where there is no such output, whose commands mention a part."""
    outputs = {run.output for run in RUNS}
    return [
        run
        for run in RUNS
        if not words
        or any(run.output == word if word in outputs else word in run.command for word in words)
    ]


def execute(commands: list[str], root: Path = ROOT) -> None:
    """Runs them one after the other, in bash."""
    names = set(re.findall(r"\$(\w+)", " ".join(commands)))
    if missing := sorted(name for name in names if name not in os.environ):
        sys.exit(
            f"Set {', '.join(missing)} in the environment: docs/results.md says what they are."
        )
    for command in commands:
        print(f"\n{command}")
        subprocess.run(["bash", "-ec", command], cwd=root, check=True)


if __name__ == "__main__":
    main()
