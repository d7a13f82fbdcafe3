"""Networks, and data sets that they are judged on: files in the folder that `--data` names."""

IMAGE, TEXT = "image-evaluation-network-32", "text-evaluation-network-minilm-l6"
IMAGES = {
    "CIFAR-10 (lossless)": {"file": "cifar10/cifar10_lossless_train4k.npz", "array": "x"},
    "MNIST test (28x28 gray, padded)": {"file": "mnist/mnist.npz", "array": "x_test"},
}
TEXTS = {
    "SST-2 dev": {"file": "sst2/dev.tsv", "blend": False},
    "SST-2 dev, blended": {"file": "sst2/dev.tsv", "blend": True},
    "WikiText-2 test": {"file": "wikitext2/test.txt", "blend": False},
    "WikiText-2 test, blended": {"file": "wikitext2/test.txt", "blend": True},
}
SAMPLES, QUICK_SAMPLES = 2000, 6

# train.py
BASE_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
TRAIN_IMAGE = {"epochs": 20, "batch_size": 128, "learning_rate": 5e-4}
TRAIN_TEXT = {
    "steps": 5000, "batch_size": 64, "learning_rate": 2e-3, "max_length": 48, "blended": 0.25,
    "jitter": 0.2,
}  # fmt: skip
