"""How much attackers smooth images: chosen on images of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from hf_gradguard.attacks import ATTACKS, GradientMatching, Observation, Reconstruction, make_attack
from hf_gradguard.audit import audit
from hf_gradguard.audit.attackers import WEIGHTS, smooths
from hf_gradguard.audit.report.verdicts import INFORMED
from tests.helpers import make_task

pytestmark = pytest.mark.usefixtures("few_probes")

OWN = 0.8  # the gray of an attacker's own images
SHADES = dict(zip(WEIGHTS, (0.1, 0.2, 0.3, 0.75, 0.4, 0.5), strict=True))


@dataclass
class Shade(GradientMatching):
    """Finds a gray that its weight says."""

    name: ClassVar[str] = "shade"
    domains: ClassVar[tuple[str, ...]] = ("image",)
    total_variation: float = 1e-4
    tried: ClassVar[list[tuple[float, int]]] = []

    def reconstruct(self, seen: Observation, generator: torch.Generator) -> Reconstruction:
        Shade.tried.append((self.total_variation, self.restarts))
        return Reconstruction(input=torch.full(seen.input_shape, SHADES[self.total_variation]))


@pytest.fixture
def shade(monkeypatch: pytest.MonkeyPatch) -> type[Shade]:
    monkeypatch.setitem(ATTACKS, "shade", Shade)
    monkeypatch.setattr(Shade, "tried", [])
    return Shade


def gray(value: float, noise: int) -> tuple[np.ndarray, int]:
    """Grays that differ in a pixel, since equal images would be one."""
    image = np.full((8, 8, 3), round(255 * value), dtype=np.uint8)
    image[0, 0, 0] = noise
    return image, noise % 3


def audited(tmp_path, attack: Any = "shade", own: int = 2, **settings: Any) -> Any:
    model, _ = make_task("vit", dtype=torch.float32)
    samples = [gray(0.2, n) for n in range(2)]  # of which the default weight shows most
    listed = [*samples, *(gray(OWN, 10 + n) for n in range(own))]
    noise = "gaussian_noise:relative_scale=1"
    return audit(
        model.eval(), None, samples, noise, attack, candidates=listed, output=tmp_path, **settings
    )


def by_attack(result: Any) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (cell["defense"], cell["attack"]): cell
        for cell in result.cells
        if "candidates" not in cell["attack"]
    }


@pytest.mark.long
def test_the_weight_that_shows_most_of_own_images(shade, tmp_path) -> None:
    result = audited(tmp_path, {"four": Shade(restarts=4)})
    noise = "gaussian_noise:relative_scale=1"
    assert result.settings["smoothing"] == {f"{noise}, four": 1e-2}
    cells = by_attack(result)
    # It is chosen on the own images, whatever the audited ones are, by one start each.
    assert set(cells) == {("none", "four"), (noise, "four"), (noise, "four" + INFORMED)}
    assert [cells[place]["knows_defense"] for place in cells] == [True, False, True]
    plain, informed = (cells[noise, "four" + end]["scores"]["psnr"][0] for end in ("", INFORMED))
    assert plain > informed + 10
    assert shade.tried[: 2 * len(WEIGHTS)] == [(weight, 1) for weight in WEIGHTS for _ in range(2)]
    assert {restarts for _, restarts in shade.tried[2 * len(WEIGHTS) :]} == {4}
    assert any("images of its own" in line for line in result.settings["threat_model"])
    # Gone on with, nothing is tried again.
    tried = len(shade.tried)
    assert audited(tmp_path, {"four": Shade(restarts=4)}).settings == result.settings
    assert len(shade.tried) == tried


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"attack": "shade:total_variation=0.001"},  # the user's
        {"own": 1},  # too few
        {"adaptive": False},
    ],
)
def test_what_is_left_as_it_is(settings: dict[str, Any], shade, tmp_path) -> None:
    result = audited(tmp_path, **settings)
    assert result.settings["smoothing"] == {}
    assert not [attack for _, attack in by_attack(result) if attack.endswith(INFORMED)]
    assert len(shade.tried) == 4  # two messages, two defenses


def test_which_attacks_smooth() -> None:
    assert smooths(make_attack("inverting_gradients"))
    assert smooths(make_attack("grad_inversion"))
    assert not smooths(make_attack("inverting_gradients", total_variation=1e-3))
    assert not smooths(make_attack("idlg"))
    assert not smooths(make_attack("analytic"))
