r"""Fine-tune a text classifier on SST-2 so that ranks share only protected gradients: `gradguard
train` with the flags of sst2.yaml, which others override.

    accelerate launch recipes/sst2.py --defense optimal_noise
    accelerate launch recipes/sst2.py --head --public wikitext.txt  # by proof: sst2_head.yaml
    accelerate launch --multi_gpu --num_processes 2 recipes/sst2.py --num_ranks 2 \
        --defense optimal_pruning --defense_kwargs '{"ratio": 0.9}' --model FacebookAI/roberta-base

Two ranks without GPUs: add `--mixed_precision no --dynamo_backend no` before the script and
`--use_cpu` after it. (`--cpu --num_processes 2` silently starts one rank.)
"""

import sys
from pathlib import Path

from hf_gradguard.cli import main

if __name__ == "__main__":
    # The rates of a whole model are none of a head's, which has defaults of its own.
    file = "sst2_head.yaml" if "--head" in sys.argv else "sst2.yaml"
    sys.exit(main(["train", "--config", str(Path(__file__).with_name(file)), *sys.argv[1:]]))
