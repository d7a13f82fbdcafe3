"""Every defense at three strengths against attacks on images, and against attackers who know the
defense.

    python recipes/train_evalnets.py image --data tinyimagenet32_10k_2k.npz --filters 32 64 128 \
        --output NETWORK
    python recipes/reproductions/image_defenses.py --images LOSSLESS.npz \
        --evaluation_network NETWORK --output docs/results/image_defenses

The first 16 images of the file, one a message, on the leakage papers' LeNet at its initial weights;
labels read off the gradient. Budgets are such that undefended gradients give the image away, and
the same for every defense. The adaptive attacker takes the mean of eight uploads of the batch where
there is fresh noise, and weighs coordinates by its covariance where that is not the same
everywhere; matches only what a pruning left; leaves out soteria's layer; starts four times over
against refiner. Behind whatever defense, Inverting Gradients then takes the total variation that
shows most of images of the attacker's own, the next 4 of the file. Both attacks stop when so many
steps of L-BFGS (20 evaluations each) brought no better match: under noise, going on fits it.

PSNR with 95 % bootstrap intervals.
"""

import torch
from every_defense import fill, present, quickly, share, strengths
from lenet import INVERTING, SMOOTHING, lenet_for, single_images, smoothed
from reporting import Results, parser_of, summary
from transformers import set_seed

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import make_attack
from hf_gradguard.metrics import score_images

DEFENSES = strengths((0.01, 0.1, 1.0), alphas=(0.1, 0.5, 0.9))
ATTACKS = {
    "inverting_gradients": {"steps": 60, "patience": 5, **INVERTING},
    "idlg": {"steps": 100, "patience": 15, "start": "uniform"},
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--images", required=True, help="npz with x (N, 32, 32, 3) and y")
    parser.add_argument("--evaluation_network", required=True, help="refiner's")
    args = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(0)
    plan = {
        "defenses": DEFENSES,
        "attacks": ATTACKS,
        "chosen": {"inverting_gradients": SMOOTHING},
        "samples": 16,
        "own": 4,
        "seed": 0,
    }
    plan = quickly(plan) | {"own": 1} if args.quick else plan
    results = Results(args.output, plan)
    batches = single_images(args.images, plan["samples"] + plan["own"])
    model, images = lenet_for(batches[0]), [batch["pixel_values"] for batch in batches]
    maps = [GradientMap(model, batch) for batch in batches]
    attacked, own = slice(plan["samples"]), slice(plan["samples"], None)

    def scores(defense: str, strength: dict, else_seen: dict, attack: str, settings: dict) -> dict:
        network = {"evaluation_network": args.evaluation_network} if defense == "refiner" else {}
        made, grants = (
            make_defense(defense, **strength, **network),
            {"input_shape": tuple(images[0].shape)},
        )
        seen = [
            share(model, gmap, made, number, grants, **else_seen)
            for number, gmap in enumerate(maps)
        ]
        settings = smoothed(settings, seen[own], images[own])
        found = make_attack(attack, **settings).together(
            seen[attacked], torch.Generator().manual_seed(0)
        )
        weight = {name: value for name, value in settings.items() if name == "total_variation"}
        return scored([one.input.nan_to_num(0.5) for one in found]) | weight

    def scored(guesses: list) -> dict:
        return summary(score_images(guesses, images[attacked]), ("psnr", "ssim"))

    fill(results, scores, again={"restarts": 4})
    chance = scored([torch.full_like(image, 0.5) for image in images[attacked]])["psnr"]  # gray
    present(args.output, results, chance, "psnr", digits=1)


if __name__ == "__main__":
    main()
