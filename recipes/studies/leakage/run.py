"""Can leakage be told without attacking? Estimates against what attacks find.

    python -m recipes.studies.leakage.run logistic --data MNIST.npz \
        --output docs/results/fil_logistic_mnist
    python -m recipes.studies.leakage.run predicts_attacks --mnist MNIST.npz \
        --cifar10 LOSSLESS.npz --sst2 SST2 --tokenizer MODEL \
        --output docs/results/influence_predicts_attacks
    python -m recipes.studies.leakage.run directions --mnist MNIST.npz --cifar10 LOSSLESS.npz \
        --output docs/results/influence_directions
    python -m recipes.studies.leakage.run unfairness --mnist MNIST.npz \
        --output docs/results/influence_unfairness
    python -m recipes.studies.leakage.run initializations --mnist MNIST.npz \
        --cifar10 LOSSLESS.npz --output docs/results/influence_initializations
"""

from ..lib.command import main
from . import directions, initializations, logistic, predicts_attacks, unfairness

if __name__ == "__main__":
    main(__doc__, [logistic, predicts_attacks, directions, unfairness, initializations])
