"""What the attacks recover from gradients that nobody defended: images on the leakage papers'
LeNet, sentences on an encoder.

    python -m recipes.studies.attacks_undefended.run images --cifar10 LOSSLESS.npz \
        --mnist MNIST.npz --output docs/results/undefended_images
    python -m recipes.studies.attacks_undefended.run text --model MODEL --data_dir SST2 \
        --output docs/results/undefended_text
"""

from ..lib.command import main
from . import images, text

if __name__ == "__main__":
    main(__doc__, [images, text])
