"""Optimal noise and optimal pruning against plain ones: Chen, Gürsoy and Lei (2024, 2025).

    python -m recipes.studies.optimal_defenses.run training --data MNIST.npz \
        --output docs/results/optimal_defenses_training
    python -m recipes.studies.optimal_defenses.run attacked mnist --data MNIST.npz \
        --output docs/results/optimal_defenses_mnist
    python -m recipes.studies.optimal_defenses.run attacked cifar10 --data LOSSLESS.npz \
        --output docs/results/optimal_defenses_cifar10
"""

from ..lib.command import main
from . import attacked, training

if __name__ == "__main__":
    main(__doc__, [training, attacked])
