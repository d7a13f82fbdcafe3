r"""Train an image classifier so that ranks share only protected gradients: `gradguard train` with
the flags of image_classification.yaml, which others override, and with the papers' networks. With
`--head` it trains a linear head by proof, with the flags of image_classification_head.yaml.

    accelerate launch recipes/image_classification.py --model google/vit-base-patch16-224 \
        --defense optimal_noise
    accelerate launch recipes/image_classification.py --head --public tinyimagenet.npz
    accelerate launch recipes/image_classification.py --dataset ylecun/mnist \
        --from_scratch gradguard_leaky_convnet --num_clients 10 --clients_per_process 4 \
        --partition dirichlet --defense optimal_pruning
    accelerate launch --multi_gpu --num_processes 2 recipes/image_classification.py --num_ranks 2 \
        --dataset my/images --from_scratch resnet \
        --model_config '{"depths": [1, 1, 1, 1], "layer_type": "basic"}' --defense gaussian_noise

Several ranks without GPUs: as in sst2.py.
"""

import os
import sys
from pathlib import Path

from hf_gradguard.cli import main

# Started as a file, it finds no other recipe by itself.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import recipes.small_networks  # noqa: F401

if __name__ == "__main__":
    # The rates of a whole model are none of a head's, which has defaults of its own.
    name = "image_classification_head" if "--head" in sys.argv else "image_classification"
    config = Path(__file__).with_name(f"{name}.yaml")
    sys.exit(main(["train", "--config", str(config), *sys.argv[1:]]))
