"""The study of what each part of Refiner's default gives."""

from __future__ import annotations

import pytest
import torch
from helpers import flat, make_task

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.randomness import Stream
from hf_gradguard.training.message import Client
from recipes.studies.refiner_parts import Sums


@pytest.mark.parametrize("feedback", [True, False])
def test_sums_are_of_gradients_without_what_is_fed_back(feedback: bool) -> None:
    defense = make_defense("quantization", sign_only=True, error_feedback=feedback)
    sums, shared, gradient = Sums(), torch.tensor(0.0), torch.tensor(0.0)
    client = Client(defense)
    sums.watch(client)
    for seed in range(3):
        gmap = GradientMap(*make_task("bert", batch_size=seed + 1))
        stream = Stream.from_seeds(seed)
        message, client.state = client.defense.apply(gmap, client.state, stream)
        shared = shared + flat(message)
        gradient = gradient + flat(gmap.gradient())
    torch.testing.assert_close(sums.gradient, gradient)
    torch.testing.assert_close(sums.shared, shared)
    expected = torch.dot(shared, gradient) / (shared.norm() * gradient.norm())
    assert sums.cosine == pytest.approx(float(expected))
