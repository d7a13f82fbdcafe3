"""Refiner's price and worth: the tables and curves of the Refiner paper (2025), and our own.

    python -m recipes.studies.refiner.run sentences --model MODEL --data_dir SST2 \
        --output docs/results/refiner_sentences
    python -m recipes.studies.refiner.run in_training --model MODEL --data_dir SST2 \
        --output docs/results/refiner_in_training
    python -m recipes.studies.refiner.run text --model MODEL --data_dir SST2 \
        --output docs/results/refiner_text
    python -m recipes.studies.refiner.run ablations --train TRAIN.parquet --test TEST.parquet \
        --images LOSSLESS.npz --evaluation_network NETWORK --output docs/results/refiner_ablations
    python -m recipes.studies.refiner.run frontier --train TRAIN.parquet --test TEST.parquet \
        --images LOSSLESS.npz --evaluation_network NETWORK --output docs/results/refiner_frontier
    python -m recipes.studies.refiner.run pruning --train TRAIN.parquet --test TEST.parquet \
        --output docs/results/refiner_pruning
"""

from ..lib.command import main
from . import ablations, frontier, in_training, pruning, sentences, text

if __name__ == "__main__":
    main(__doc__, [sentences, in_training, text, ablations, frontier, pruning])
