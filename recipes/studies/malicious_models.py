"""Nine ways to make weights that leak, each in a model of its own, and what they give away."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.modeling_outputs import ImageClassifierOutput

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.attacks.analytic import divide_rows
from hf_gradguard.metrics import score_images

CONSTRUCTIONS = (
    "imprint module (Robbing the Fed)",
    "imprint in a transformer (Decepticons)",
    "one class let through (Fishing)",
    "trap weights (Curious Abandon Honesty)",
    "rows in pairs",
    "attention on single tokens",
    "ladder of noisy rows",
    "drawn rows that fire rarely",
    "sharpened attention",
)
PARTLY = "rarely firing units among others"
HONEST = "none of them"
FROZEN = "none of them, first block frozen"
SIZE, CHANNELS, CLASSES = 16, 3, 10
IMPRINT, DECEPTICONS, FISHING, TRAPS, PAIRS, SINGLE, NOISY, RARE, SHARPENED = CONSTRUCTIONS
LENGTH = 12  # tokens of a text


class PerceptronConfig(PretrainedConfig):
    model_type = "study-perceptron"
    image_size, num_channels, units = SIZE, CHANNELS, 256


class Perceptron(PreTrainedModel):
    """Two convolutions of stride 1 that keep the pixels apart would do as well: what counts is a
    layer with a bias and a ReLU over what was flattened.
    """

    config_class, main_input_name = PerceptronConfig, "pixel_values"

    def __init__(self, config: PerceptronConfig) -> None:
        super().__init__(config)
        self.flat = nn.Flatten()
        self.input_layer = nn.Linear(CHANNELS * SIZE * SIZE, config.units)
        self.second = nn.Linear(config.units, 64)
        self.head = nn.Linear(64, config.num_labels)
        self.post_init()

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        hidden = self.input_layer(self.flat(pixel_values)).relu()
        logits = self.head(self.second(hidden).relu())
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


class Imprinted(nn.Module):
    """What was put in front of a model: pixels, through a layer of bins, and back."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.bins = nn.Linear(CHANNELS * SIZE * SIZE, units)
        self.back = nn.Linear(units, CHANNELS * SIZE * SIZE)

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels + self.back(self.bins(pixels.flatten(1)).relu()).view_as(pixels)


class Fronted(nn.Conv2d):
    """The patch embedding of a model that got something in front of it."""

    front: nn.Module

    def forward(self, pixels: Tensor) -> Tensor:
        return super().forward(self.front(pixels))


@dataclass
class Planted:
    """A model with planted weights.

    Args:
        model: The model.
        layer: The layer that is read.
        kind: `"image"` or `"text"`.
    """

    model: nn.Module
    layer: str
    kind: str


def perceptron(units: int) -> Perceptron:
    return Perceptron(PerceptronConfig(units=units, num_labels=CLASSES)).eval()


def ladder(linear: nn.Linear, direction: Tensor, values: Tensor) -> None:
    """All rows measure the same, and unit k is active above the k-th quantile of the values."""
    steps = torch.linspace(0.01, 0.99, linear.out_features)
    with torch.no_grad():
        linear.weight.copy_(direction.expand_as(linear.weight))
        linear.bias.copy_(-values.quantile(steps))


def imprint(public: Tensor, plan: dict) -> Planted:
    """A module before a ViT, which the architecture does not have: brightness in bins."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = ViTForImageClassification(
        ViTConfig(**sizes, intermediate_size=64, image_size=SIZE, patch_size=8, num_labels=CLASSES)
    ).eval()
    block = Imprinted(plan["units"])
    direction = torch.full((1, public[0].numel()), 1 / public[0].numel())
    ladder(block.bins, direction, public.flatten(1).mean(1))
    with torch.no_grad():
        block.back.weight.copy_(torch.randn(len(block.back.weight), 1).expand_as(block.back.weight))
    patches = model.vit.embeddings.patch_embeddings.projection
    patches.__class__, patches.front = Fronted, block
    return Planted(model, "vit.embeddings.patch_embeddings.projection.front.bins", "image")


def decepticons(public: Tensor, plan: dict) -> Planted:
    """A feed-forward layer of bins behind an attention that adds nothing."""
    width = plan["width"]
    config = BertConfig(
        vocab_size=200, hidden_size=width, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=plan["units"], hidden_act="relu", num_labels=2, pad_token_id=0,
        max_position_embeddings=32,
    )  # fmt: skip
    model = BertForSequenceClassification(config).eval()
    block = model.bert.encoder.layer[0]
    direction = torch.randn(1, width)
    with torch.no_grad():
        block.attention.output.dense.weight.zero_()
        inputs = input_of(model, block.intermediate.dense, torch.randint(5, 200, (64, 12)))
        ladder(block.intermediate.dense, direction, (inputs @ direction[0]))
        block.output.dense.weight.copy_(
            torch.randn(width, 1).expand_as(block.output.dense.weight) / plan["units"]
        )
    return Planted(model, "bert.encoder.layer.0.intermediate.dense", "text")


def fishing(public: Tensor, plan: dict) -> Planted:
    """The head cuts all classes off but one: what flows back is of that class's samples."""
    model = perceptron(plan["units"])
    with torch.no_grad():
        model.head.weight[1:] = 0
        model.head.bias[1:] = 1000.0
    return Planted(model, "input_layer", "image")


def traps(public: Tensor, plan: dict) -> Planted:
    """Half of a row's entries are negative, the others mirror them a little smaller: bright and
    dark cancel but in a few samples.
    """
    model = perceptron(plan["units"])
    outputs, inputs = model.input_layer.weight.shape
    half = inputs // 2
    with torch.no_grad():
        for row in range(outputs):
            order, size = torch.randperm(inputs), torch.randn(half).abs() / inputs**0.5
            model.input_layer.weight[row, order[:half]] = -size
            model.input_layer.weight[row, order[half:]] = 0.97 * size[torch.randperm(half)]
        model.input_layer.bias.zero_()
    return Planted(model, "input_layer", "image")


def pairs(public: Tensor, plan: dict) -> Planted:
    """Every direction several times, with biases close by: differences hold what is between."""
    model, repeats = perceptron(plan["units"]), 16
    with torch.no_grad():
        directions = torch.randn(plan["units"] // repeats, model.input_layer.in_features)
        directions = (
            directions - directions.mean(1, keepdim=True)
        ) / model.input_layer.in_features**0.5
        for group, direction in enumerate(directions):
            rows_of_group = slice(group * repeats, (group + 1) * repeats)
            steps = torch.linspace(0.02, 0.98, repeats)
            model.input_layer.weight[rows_of_group] = direction
            model.input_layer.bias[rows_of_group] = -(public.flatten(1) @ direction).quantile(steps)
    return Planted(model, "input_layer", "image")


def frozen(public: Tensor, plan: dict) -> Planted:
    """The first of three blocks is not trained: what the others read was mixed by its attention."""
    config = BertConfig(
        vocab_size=200, hidden_size=plan["width"], num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=plan["units"], num_labels=2, pad_token_id=0, max_position_embeddings=32,
    )  # fmt: skip
    model = BertForSequenceClassification(config).eval()
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[0].requires_grad_(False)
    return Planted(model, "bert.encoder.layer.1", "text")


def single_tokens(public: Tensor, plan: dict) -> Planted:
    """The same, with queries and keys of the frozen block alike and huge: every token attends to
    itself, and the second block reads tokens that nothing has mixed.
    """
    planted = frozen(public, plan)
    attention = planted.model.bert.encoder.layer[0].attention.self
    with torch.no_grad():
        rotation = 20 * torch.linalg.qr(torch.randn_like(attention.query.weight)).Q
        attention.query.weight.copy_(rotation)
        attention.key.weight.copy_(rotation)
    return planted


def noisy_ladder(public: Tensor, plan: dict) -> Planted:
    """A ladder whose rows have noise of their own, and thresholds of their own for that."""
    model = perceptron(plan["units"])
    pixels = public.flatten(1)
    with torch.no_grad():
        rows = 1 + plan.get("strength", 0.05) * torch.randn_like(model.input_layer.weight)
        model.input_layer.weight.copy_(rows / pixels.shape[1])
        set_thresholds(model.input_layer, pixels, torch.linspace(0.01, 0.99, plan["units"]))
        model.second.weight.copy_(torch.randn(64, 1).expand_as(model.second.weight))
    return Planted(model, "input_layer", "image")


def rare_units(public: Tensor, plan: dict) -> Planted:
    """Rows as they were drawn; thresholds that one in fourteen public images exceeds."""
    model = perceptron(plan["units"])
    rate = plan.get("strength", 0.07)
    set_thresholds(model.input_layer, public.flatten(1), torch.full((plan["units"],), 1 - rate))
    return Planted(model, "input_layer", "image")


def partly_rare(public: Tensor, plan: dict) -> Planted:
    """The same of a share of all units; the others are as they were."""
    planted = rare_units(public, {**plan, "strength": 0.07})
    bias = planted.model.input_layer.bias
    with torch.no_grad():
        bias[int(plan.get("strength", 0.25) * len(bias)) :] = 0
    return planted


def set_thresholds(linear: nn.Linear, inputs: Tensor, quantiles: Tensor) -> None:
    """Each unit is active above that quantile of its own values."""
    with torch.no_grad():
        values = (inputs @ linear.weight.T).sort(0).values
        places = (quantiles * (len(values) - 1)).long()
        linear.bias.copy_(-values.gather(0, places[None])[0])


def sharpened(public: Tensor, plan: dict) -> Planted:
    """The frozen block's queries and keys as drawn, so many times as large."""
    planted = frozen(public, plan)
    attention = planted.model.bert.encoder.layer[0].attention.self
    with torch.no_grad():
        for layer in (attention.query, attention.key):
            layer.weight.mul_(plan.get("strength", 40))
    return planted


def honest(public: Tensor, plan: dict) -> Planted:
    return Planted(perceptron(plan["units"]), "input_layer", "image")


BUILT = {
    IMPRINT: imprint, DECEPTICONS: decepticons, FISHING: fishing, TRAPS: traps, PAIRS: pairs,
    SINGLE: single_tokens, NOISY: noisy_ladder, RARE: rare_units, SHARPENED: sharpened,
    PARTLY: partly_rare, HONEST: honest, FROZEN: frozen,
}  # fmt: skip


def disturb(planted: Planted, share: float) -> None:
    """Noise on what was planted, so that rows are not exactly alike."""
    with torch.no_grad():
        for parameter in planted.model.parameters():
            size = parameter.square().mean().sqrt()
            parameter += share * size * torch.randn_like(parameter)


def input_of(model: nn.Module, layer: nn.Module, ids: Tensor) -> Tensor:
    """`(n, in)`: what a layer reads of texts."""
    inputs_seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, args: inputs_seen.append(args[0].detach()))
    with torch.no_grad():
        model(input_ids=ids)
    handle.remove()
    return inputs_seen[0].flatten(0, -2)


def leaks(planted: Planted, images: Tensor, plan: dict) -> float:
    """Of one message, the share of its images (above 30 dB) or tokens that are recovered."""
    model = planted.model
    if planted.layer == "bert.encoder.layer.1":
        return tokens_spanned(planted)
    if planted.kind == "text":
        return tokens_read(planted, plan)
    batch = {"pixel_values": images, "labels": torch.arange(len(images)) % CLASSES}
    gradient = GradientMap(model, batch, second_order=False).gradient()
    observation = Observation(model=model, gradient=gradient, input_shape=tuple(images.shape))
    guess = make_attack("analytic")(observation).input
    psnr = score_images(guess, images, bootstrap=0).per_sample["psnr"]
    return float((torch.tensor(psnr) > 30).float().mean())


def tokens_read(planted: Planted, plan: dict) -> float:
    """Each reading of the layer's inputs is the nearest token at the nearest place."""
    model, length = planted.model, LENGTH
    ids = torch.randint(5, 200, (plan["texts"], length))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    labels = torch.arange(len(ids)) % 2
    gradient = GradientMap(model, {**batch, "labels": labels}, second_order=False).gradient()
    layer = model.get_submodule(planted.layer)
    rows = divide_rows(
        gradient[f"{planted.layer}.weight"], gradient[f"{planted.layer}.bias"], layer.bias
    )
    # every token at every place, as the layer reads it where attention adds nothing
    tokens_at_places = torch.arange(5, 200)[:, None].expand(-1, length)
    vectors = input_of(model, layer, tokens_at_places)
    distance = torch.cdist(rows, vectors) / vectors.norm(dim=1).mean()
    near = distance.min(1)
    recovered = {
        (int(place) % length, int(place) // length + 5)
        for place, far in zip(near.indices, near.values, strict=True)
        if far < 0.05
    }
    true = {(place, int(token)) for row in ids for place, token in enumerate(row)}
    return len(recovered & true) / len(true)


def tokens_spanned(planted: Planted) -> float:
    """Of a text's tokens at their places, those that span finds in the gradients of what is
    trained.
    """
    model = planted.model
    ids = torch.randint(5, 200, (1, LENGTH))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    labels = torch.zeros(1, dtype=torch.long)
    gradient = GradientMap(model, {**batch, "labels": labels}, second_order=False).gradient()
    try:
        token_ids = make_attack("span")(Observation(model, gradient, (1, LENGTH))).token_ids
    except ValueError:  # nothing that reads single tokens
        return 0.0
    return sum(a == b for a, b in zip(token_ids[0], ids[0].tolist(), strict=True)) / LENGTH
