"""Images that an untrained network draws: its pixels and slopes against a network of torch's own
layers and differences in float64, and what gradient matching makes of them.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import make_task
from torch import Tensor, nn

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.attacks.matching.descent import _Descent
from hf_gradguard.attacks.matching.matching_attacks import DLG, DeepImagePrior
from hf_gradguard.attacks.matching.space import CODE, WIDTH, DeepPrior
from hf_gradguard.gradient_map.inputs import PixelSpace
from hf_gradguard.testing import check_attack
from recipes.small_networks import LeakageLeNetConfig, LeakageLeNetForImageClassification

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]
RANGE = PixelSpace(torch.zeros((), dtype=torch.float64), MEAN, STD)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def prior(shape: tuple[int, ...], seed: int = 0, pixels: PixelSpace = RANGE) -> DeepPrior:
    return DeepPrior(pixels, shape, torch.zeros((), dtype=torch.float64), seeded(seed))


def lenet(side: int) -> nn.Module:
    torch.manual_seed(0)
    config = LeakageLeNetConfig(image_size=side, hidden_channels=6, strides=[1, 2], num_labels=3)
    model: nn.Module = LeakageLeNetForImageClassification(config).double().eval()
    return model


def smooth(side: int, phase: float = 0.0) -> Tensor:
    """One image in [0, 1], and no edge in it."""
    y, x = torch.meshgrid(*[torch.linspace(0, 3, side, dtype=torch.float64)] * 2, indexing="ij")
    waves = [torch.sin(x + phase), torch.cos(y + phase), torch.sin(x + y + phase)]
    return 0.5 + 0.45 * torch.stack(waves)[None]


def observed(model: nn.Module, plain: Tensor, **grants: Any) -> Observation:
    pixels = (plain - RANGE.mean) / RANGE.std
    labels = torch.arange(len(pixels)) % 3
    shared = GradientMap(model, {"pixel_values": pixels, "labels": labels}).gradient()
    known: dict[str, Any] = {"labels": labels, "image_mean": MEAN, "image_std": STD}
    return Observation(model, shared, tuple(pixels.shape), **known | grants)


def of_torchs_layers(network: DeepPrior, number: int) -> nn.Sequential:
    """One of its networks, of torch's own modules."""
    layers: list[nn.Module] = []
    inputs = CODE
    for block in range(len(network.sizes) + 1):
        if 0 < block < len(network.sizes):
            layers.append(nn.Upsample(network.sizes[block], mode="bilinear"))
        layers += [nn.Conv2d(inputs, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH)]
        layers.append(nn.LeakyReLU(0.1))
        inputs = WIDTH
    layers += [nn.Conv2d(WIDTH, network.shape[2], 1), nn.Sigmoid()]
    made = nn.Sequential(*layers).double()
    with torch.no_grad():
        for own, every in zip(made.parameters(), network.weights, strict=True):
            own.copy_(every.view(network.networks, *own.shape)[number])
    return made


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((2, 2, 3, 32, 32), [(8, 8), (16, 16), (32, 32)]),
        ((3, 1, 1, 8, 8), [(4, 4), (8, 8)]),
        ((1, 1, 4, 9, 21), [(5, 11), (9, 21)]),
    ],
)
def test_each_image_is_drawn_by_a_network_of_its_own(
    shape: tuple[int, ...], sizes: list[tuple[int, int]]
) -> None:
    network = prior(shape, pixels=PixelSpace(torch.zeros((), dtype=torch.float64)))
    assert network.sizes == sizes
    drawn = network.draw().detach()
    assert drawn.shape == shape
    codes = network.code.view(network.networks, CODE, *sizes[0])
    for number, image in enumerate(drawn.flatten(0, 1)):
        alone = of_torchs_layers(network, number)(codes[number][None])[0]
        assert torch.allclose(alone, image, rtol=0, atol=1e-10)
    first = drawn.flatten(0, 1)[0]
    assert all(float((first - other).abs().mean()) > 0.01 for other in drawn.flatten(0, 1)[1:])


def test_images_stay_in_the_pixels_range() -> None:
    network = prior((2, 1, 3, 8, 8))
    for sign, end in ((1, RANGE.high), (-1, RANGE.low)):
        with torch.no_grad():
            network.weights[-1].fill_(sign * 100.0)
        assert torch.allclose(network.draw(), end.expand(2, 1, 3, 8, 8))


def test_slopes_by_the_weights_are_differences_of_the_objective() -> None:
    """With a prior on the image beside it, and of two candidates that do not mix."""
    attack = DeepImagePrior(restarts=2, total_variation=0.1)
    problem = attack.problem([observed(lenet(8), smooth(8))])
    network = problem.network(seeded())
    descent = _Descent(problem, network.draw().detach(), slice(None), network)

    def objective() -> float:
        """From the image on, by other means: plain gradients, and the formulas."""
        total = 0.0
        with torch.no_grad():
            images = network.draw()
        shared = torch.cat([g.flatten() for g in problem.observation.gradient.values()])
        for x in images:
            gradient = problem.gmap.gradient_at(x, labels=problem.labels[0])
            flat = torch.cat([gradient[name].flatten() for name in problem.observation.gradient])
            cosine = float(flat @ shared / (flat.norm() * shared.norm()))
            steps = float(x.diff(dim=-1).abs().mean() + x.diff(dim=-2).abs().mean())
            total += 1 - cosine + 0.1 * steps
        return total

    value = descent._evaluate(problem.slopes)
    assert value == pytest.approx(objective(), rel=1e-9)
    for weight in network.weights:
        assert weight.grad is not None
        direction = torch.randn(weight.shape, generator=seeded(3), dtype=torch.float64)
        said, ends = float((weight.grad * direction).sum()), []
        for move in (1e-6, -1e-6):
            with torch.no_grad():
                weight += move * direction
                ends.append(objective())
                weight -= move * direction
        assert said == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-7)


def psnr(found: Tensor | None, plain: Tensor) -> float:
    assert found is not None
    return -10 * math.log10(float((RANGE.plain(found) - plain).square().mean()))


@pytest.mark.long
def test_smooth_images_are_read_together() -> None:
    """Measured: 24 and 25 dB, where gray has 10."""
    model, truth = lenet(16), [smooth(16), smooth(16, 1.0)]
    seen = [observed(model, plain) for plain in truth]
    found = make_attack("deep_image_prior", steps=40).reconstruct_many(seen, seeded())  # type: ignore[attr-defined]
    read = [psnr(one.input, plain) for one, plain in zip(found, truth, strict=True)]
    gray = [psnr((0.5 - RANGE.mean) / RANGE.std + 0 * plain, plain) for plain in truth]
    assert all(one > other + 8 for one, other in zip(read, gray, strict=True))
    for one in found:
        assert len(one.history) == 40
        assert one.objective == min(one.history)


def test_one_seed_gives_one_image_and_nothing_else_moves() -> None:
    model = lenet(8)
    seen = observed(model, smooth(8))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    attack = DeepImagePrior(steps=3, restarts=2)
    images = [attack(seen, seeded(seed)).input for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert images[0] is not None
    assert images[1] is not None
    assert images[2] is not None
    assert torch.equal(images[0], images[1])
    assert float((images[0] - images[2]).abs().mean()) > 0.01


def test_the_best_of_restarts_and_steps_is_returned() -> None:
    attack = DeepImagePrior(steps=4, restarts=3)
    seen = observed(lenet(8), smooth(8))
    found = attack(seen, seeded())
    assert found.input is not None
    problem = attack.problem([seen])
    assert float(problem.distance(found.input, 0)) == pytest.approx(found.objective, rel=1e-6)


def test_labels_that_are_optimized_move_with_the_weights() -> None:
    seen = observed(lenet(8), smooth(8), labels=None)
    attack = DLG(prior="deep", optimizer="adam", learning_rate=0.01, steps=30)
    found = attack(seen, seeded())
    assert found.labels is not None
    assert found.labels.tolist() == [0]
    assert found.objective < found.history[0]


def test_it_keeps_the_contract() -> None:
    check_attack(DeepImagePrior(steps=1))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"optimizer": "lbfgs"}, r"Adam evens that out, lbfgs does not. Set optimizer='adam'"),
        ({"optimizer": "adamw"}, "Set optimizer='adam'"),
        ({"signed": True}, "set signed=False"),
        ({"start": torch.zeros(1, 3, 8, 8)}, "leave start out"),
        ({"prior": "shallow"}, "must be 'deep' or None, but is 'shallow'"),
    ],
)
def test_refused_settings(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_attack("deep_image_prior", **settings)


def test_refused_inputs() -> None:
    model, batch = make_task("bert")
    shared = GradientMap(model, batch).gradient()
    text = Observation(model, shared, tuple(batch["input_ids"].shape), labels=batch["labels"])
    refused = r"deep_image_prior is for image, but the input is tokens. For tokens take tag"
    with pytest.raises(ValueError, match=refused):
        make_attack("deep_image_prior")(text)
    with pytest.raises(ValueError, match=r"draws pixels, and this input has none. Take prior=None"):
        make_attack("tag", prior="deep", optimizer="adam", steps=1)(text)
    with pytest.raises(ValueError, match="lamp moves candidates between steps"):
        make_attack("lamp", prior="deep", optimizer="adam")
    with pytest.raises(ValueError, match=r"from 8 x 8 pixels on, but these have 7 x 9"):
        prior((1, 1, 3, 7, 9))
