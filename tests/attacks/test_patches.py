"""Vision transformers' patches, read off the gradients of their position embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.attacks.analytic import is_readable, solve_patches
from hf_gradguard.audit import audit, summarize

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "image_size": 16, "patch_size": 4, "num_labels": 3,
}  # fmt: skip
MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]


def model_of(kind: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {name: value for name, value in (SIZES | changes).items() if value is not None}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    made: nn.Module = getattr(transformers, f"{kind}ForImageClassification")(config)
    return made.double().eval()


def image(count: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    plain = torch.rand(count, 3, 16, 16, generator=generator, dtype=torch.float64)
    return (plain - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def seen_of(model: nn.Module, pixels: torch.Tensor, **grants: Any) -> Observation:
    labels = torch.arange(len(pixels)) % 3
    gmap = GradientMap(model, {"pixel_values": pixels, "labels": labels}, second_order=False)
    known = {"labels": labels, "image_mean": MEAN, "image_std": STD}
    return Observation(model, gmap.gradient(), tuple(pixels.shape), **known | grants)


def error(seen: Observation, pixels: torch.Tensor) -> float:
    found = make_attack("analytic")(seen).input
    assert found is not None
    return float((found - pixels).square().mean().sqrt())


def test_patches_by_hand() -> None:
    """Slopes 2 and 1, patches 3 and -4."""
    slopes, patches = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[3.0], [-4.0]])
    product = torch.tensor([[6.0], [-4.0]])
    assert torch.equal(slopes.T @ patches, product)
    solved, rank = solve_patches(slopes, product, torch.zeros(2, 1))
    assert solved.flatten().tolist() == pytest.approx([3.0, -4.0])
    # s G / (s² + 1): 2 · 6 / 5 and 1 · -4 / 2
    noisy, _ = solve_patches(slopes, product, torch.zeros(2, 1), ratio=1.0)
    assert noisy.flatten().tolist() == pytest.approx([2.4, -2.0])
    # One slope for both says their sum alone: as near to 1 and 1 as 7 can be.
    both, one = solve_patches(torch.ones(2, 1), torch.tensor([[7.0]]), torch.ones(2, 1))
    assert both.flatten().tolist() == pytest.approx([3.5, 3.5])
    assert (rank, one) == (2, 1)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("ViT", {}),
        ("DeiT", {}),  # a distillation token beside the class token
        ("Beit", {"use_absolute_position_embeddings": True}),
        ("Dinov2", {}),
    ],
)
def test_one_image_is_read_exactly(kind: str, changes: dict[str, Any]) -> None:
    model, pixels = model_of(kind, **changes), image()
    assert is_readable(model, (1, 3, 16, 16))
    assert error(seen_of(model, pixels), pixels) < 1e-6
    assert error(seen_of(model, pixels, labels=None), pixels) < 1e-6


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Beit", {"use_absolute_position_embeddings": False, "use_relative_position_bias": True}),
        # 16 patches of 4 dimensions, and a linear layer of that shape
        ("ConvNext", {"hidden_sizes": [4, 8], "depths": [1, 1], "num_stages": 2}),
    ],
)
def test_what_adds_no_positions_is_refused(kind: str, changes: dict[str, Any]) -> None:
    model = model_of(kind, **changes)
    assert not is_readable(model, (1, 3, 16, 16))
    with pytest.raises(ValueError, match=r"no position embeddings .* Take inverting_gradients"):
        make_attack("analytic")(seen_of(model, image()))


def test_positions_that_are_added_elsewhere_are_refused() -> None:
    """Swin's come after a normalization of the patches' embeddings."""
    swin = dict.fromkeys(["hidden_size", "num_hidden_layers", "num_attention_heads"])
    swin |= {"embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 4}
    model = model_of("Swin", use_absolute_embeddings=True, **swin)
    with pytest.raises(ValueError, match="are not added to what"):
        make_attack("analytic")(seen_of(model, image()))


def test_several_images_are_refused() -> None:
    with pytest.raises(ValueError, match="of one image, and of 2 a gradient holds sums"):
        make_attack("analytic")(seen_of(model_of("ViT"), image(2)))


@pytest.mark.parametrize("left", ["position_embeddings", "projection.weight"])
def test_what_was_not_shared_is_named(left: str) -> None:
    whole = seen_of(model_of("ViT"), image())
    rest = {name: g for name, g in whole.gradient.items() if not name.endswith(left)}
    seen = Observation(whole.model, rest, whole.input_shape, labels=whole.labels)
    with pytest.raises(ValueError, match=r"projection.weight .* both were not shared"):
        make_attack("analytic")(seen)


def test_more_patches_than_dimensions_are_read_in_part() -> None:
    model, pixels = model_of("ViT", hidden_size=12), image()
    seen = seen_of(model, pixels)
    found = make_attack("analytic")(seen)
    assert "16 patches, of 12 dimensions, are 11 independent" in found.undecided
    # What it does not see is taken for gray, the rest is exact: 11 of 16 dimensions.
    gray = (0.5 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    assert error(seen, pixels) < 0.8 * float((pixels - gray).square().mean().sqrt())


def test_known_noise_is_weighed() -> None:
    model, pixels = model_of("ViT"), image()
    whole = seen_of(model, pixels)
    names = [name for name in whole.gradient if "embeddings" in name]
    size = torch.cat([whole.gradient[name].flatten() for name in names]).std()
    scale = 0.03 * float(size)
    generator = torch.Generator().manual_seed(2)
    noisy = {
        name: g + scale * torch.randn(g.shape, generator=generator, dtype=g.dtype)
        for name, g in whole.gradient.items()
    }
    shape = whole.input_shape
    told, untold = (
        Observation(
            model, noisy, shape, whole.labels, noise_variance=v, image_mean=MEAN, image_std=STD
        )
        for v in (scale**2, None)
    )
    by_name = {name: torch.full_like(g, scale**2) for name, g in noisy.items()}
    each = Observation(
        model, noisy, shape, whole.labels, noise_variance=by_name, image_mean=MEAN, image_std=STD
    )
    assert error(told, pixels) < 0.95 * error(untold, pixels)
    assert error(each, pixels) == pytest.approx(error(told, pixels))


@pytest.mark.long
def test_an_undefended_vision_transformer_is_never_at_chance(tmp_path) -> None:
    """`analytic` is among the attacks that an audit takes by itself."""
    from hf_gradguard.audit import run

    samples = [
        (torch.randint(256, (16, 16, 3), generator=torch.Generator().manual_seed(n)).byte(), n)
        for n in range(2)
    ]
    samples = [(pixels.numpy(), label) for pixels, label in samples]
    model = model_of("ViT").float()
    assert run.default_attacks(model, {"pixel_values": torch.zeros(1, 3, 16, 16)}).endswith(
        ",analytic"
    )
    result = audit(model, None, samples, "none", "analytic", output=tmp_path)
    (verdict,) = summarize(result).verdicts
    assert verdict.standing != "At chance"
    assert min(cell["scores"]["psnr"][0] for cell in result.cells) > 60
