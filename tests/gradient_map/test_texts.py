"""Batches of several texts: one continuous input of all of them, against a dense Jacobian."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.gradient_map.domain import check_batch, count_rows, domain_of_batch
from hf_gradguard.gradient_map.random_batch import random_batch
from hf_gradguard.randomness import Stream

WORDS, WIDTH = 11, 3


class Encoder(nn.Module):
    """Embeds a text as the mean of what a layer makes of its tokens; its loss is of two texts.

    Args:
        way: How it embeds: one text after the other, both in one call with the shorter one padded,
            or each of them twice.
        reference: Whether it also compares with itself, without gradients.
    """

    def __init__(self, way: str = "apart", reference: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.table = nn.Embedding(WORDS, WIDTH, dtype=torch.float64)
            self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.way, self.reference = way, reference

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return (self.layer(hidden).tanh() * mask[..., None]).sum(1) / mask.sum(1)[:, None]

    def compare(self, one: Tensor, other: Tensor) -> Tensor:
        """In-batch negatives: every row's loss is of all rows."""
        scores = 3 * one @ other.T
        return nn.functional.cross_entropy(scores, torch.arange(len(one)))

    def texts(self, batch: dict[str, Tensor]) -> list[Tensor]:
        texts = [(batch[f"{n}_input_ids"], batch[f"{n}_attention_mask"]) for n in ("a", "b")]
        if self.way == "together":
            width = max(ids.shape[1] for ids, _ in texts)
            wide = [
                torch.cat(
                    [nn.functional.pad(pair[k], (0, width - pair[k].shape[1])) for pair in texts]
                )
                for k in (0, 1)
            ]
            return list(self.pooled(self.table(wide[0]), wide[1]).chunk(2))
        return [self.pooled(self.table(ids), mask) for ids, mask in texts]

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        loss = self.compare(*self.texts(batch))
        if self.way == "twice":
            loss = loss + 0.5 * self.compare(*self.texts(batch)[::-1])
        if self.reference:
            with torch.no_grad():
                fixed = self.compare(*self.texts(batch))
            loss = loss + (loss - fixed).square()
        return {"loss": loss}

    def direct(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """The loss, of embeddings side by side."""
        first = batch["a_input_ids"].shape[1]
        one, other = (
            self.pooled(part, batch[f"{name}_attention_mask"])
            for name, part in (("a", x[:, :first]), ("b", x[:, first:]))
        )
        loss = self.compare(one, other)
        if self.way == "twice":
            loss = loss + 0.5 * self.compare(other, one)
        if self.reference:
            loss = loss + (loss - self.compare(*self.texts(batch)).detach()).square()
        return loss


def pairs(rows: int = 3) -> dict[str, Tensor]:
    """Texts of 4 and of 2 tokens."""
    generator = torch.Generator().manual_seed(1)
    batch: dict[str, Tensor] = {}
    for name, length in (("a", 4), ("b", 2)):
        batch[f"{name}_input_ids"] = torch.randint(1, WORDS, (rows, length), generator=generator)
        batch[f"{name}_attention_mask"] = torch.ones(rows, length, dtype=torch.long)
    batch["a_attention_mask"][0, 2:] = 0
    return batch


def dense(model: Encoder, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """x, g and J `(m, d)`, of a model that is fed embeddings."""
    x = torch.cat([model.table(batch[f"{n}_input_ids"]) for n in ("a", "b")], 1).detach()
    weights = tuple(model.layer.parameters())

    def gradient(at: Tensor) -> Tensor:
        found = torch.autograd.grad(model.direct(at, batch), weights, create_graph=True)
        return torch.cat([tensor.flatten() for tensor in found])

    jacobian = torch.autograd.functional.jacobian(gradient, x)
    return x, gradient(x.requires_grad_()).detach(), jacobian.flatten(1).T


WAYS = [("apart", False), ("together", False), ("twice", False), ("apart", True), ("twice", True)]


@pytest.mark.parametrize(("way", "reference"), WAYS)
def test_against_a_dense_jacobian(way: str, reference: bool) -> None:
    model, batch = Encoder(way, reference), pairs()
    x, g, jacobian = dense(model, batch)
    gmap = GradientMap(model, batch)
    assert torch.equal(gmap.input, x)
    assert list(gmap.gradient()) == ["layer.weight", "layer.bias"]
    torch.testing.assert_close(torch.cat([t.flatten() for t in gmap.gradient().values()]), g)
    delta = torch.randn(len(g), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    parts = {"layer.weight": delta[: WIDTH**2].view(WIDTH, WIDTH), "layer.bias": delta[WIDTH**2 :]}
    torch.testing.assert_close(gmap.vjp(parts).flatten(), jacobian @ delta)
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = torch.cat([tensor.flatten() for tensor in gmap.jvp(v).values()])
    torch.testing.assert_close(found, v.flatten() @ jacobian)


@pytest.mark.long
@pytest.mark.parametrize(("way", "reference"), [("together", False), ("twice", True)])
@pytest.mark.parametrize("method", ["difference", "exact"])
def test_sensitivities_against_a_dense_jacobian(way: str, reference: bool, method: Any) -> None:
    """The relative deviation of 400 probes' mean is √(2/400) = 7 %; each entry is within five of
    them.
    """
    model, batch = Encoder(way, reference), pairs()
    expected = dense(model, batch)[2].square().sum(0)
    gmap = GradientMap(model, batch)
    found = gmap.squared_sensitivity(400, Stream.from_seeds(4), method=method)
    squares = torch.cat([tensor.flatten() for tensor in found.values()])
    assert ((squares / expected - 1).abs() < 5 * (2 / 400) ** 0.5).all()


def test_texts_that_are_equal_are_one() -> None:
    batch = pairs()
    for kind in ("input_ids", "attention_mask"):
        batch[f"b_{kind}"] = batch[f"a_{kind}"].clone()
    gmap = GradientMap(Encoder(), batch)
    assert gmap.input.shape == (3, 4, WIDTH)
    assert gmap.domain.main_input(batch).shape == (3, 4)
    present = gmap.domain.present(batch)
    assert present is not None
    assert torch.equal(present, batch["a_attention_mask"].bool())
    drawn = random_batch(gmap.domain, gmap.model, batch, Stream.from_seeds(1))
    assert torch.equal(drawn["a_input_ids"], drawn["b_input_ids"])


def test_a_random_batch_has_nothing_of_the_texts() -> None:
    batch = pairs() | {"label": torch.ones(3, dtype=torch.float64), "a_modality": "text"}
    drawn = random_batch(domain_of_batch(batch), Encoder(), batch, Stream.from_seeds(1))
    assert drawn.keys() == batch.keys()
    assert drawn["a_attention_mask"].all()
    assert not torch.equal(drawn["a_input_ids"], batch["a_input_ids"])
    assert not torch.equal(drawn["a_input_ids"][:, :2], drawn["b_input_ids"])
    assert not drawn["label"].eq(1).any()


@pytest.mark.parametrize("defense", ["optimal_noise", "optimal_pruning", "optimal_dp_sgd"])
def test_defenses_that_weigh_by_sensitivity(defense: str) -> None:
    message = make_defense(defense)(GradientMap(Encoder(), pairs()), Stream.from_seeds(1))
    assert list(message) == ["layer.weight", "layer.bias"]


class Noisy(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        made = super().forward(ids)
        return made + torch.randn_like(made)


def test_a_text_that_is_embedded_in_two_ways_is_refused() -> None:
    model = Encoder("twice")
    model.table = Noisy(WORDS, WIDTH, dtype=torch.float64)
    with pytest.raises(ValueError, match="embedded twice, and not in the same way"):
        GradientMap(model, pairs())


def test_a_text_that_the_batch_does_not_hold_is_refused() -> None:
    model, batch = Encoder(), pairs()

    def other(module: Any, args: Any, kwargs: dict[str, Tensor]) -> Any:
        ids = kwargs["b_input_ids"]
        return args, {**kwargs, "b_input_ids": ids + 1 - 2 * (ids == WORDS - 1).long()}

    model.register_forward_pre_hook(other, with_kwargs=True)
    with pytest.raises(ValueError, match=r"ran 2 times .* holds 2 \(a_input_ids, b_input_ids\)"):
        GradientMap(model, batch)
    assert not model.table._forward_hooks


# No continuous input


class Sounds(nn.Module):
    """Reads what is neither text nor image."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, input_features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layer(input_features), labels)}


SOUNDS = {"input_features": torch.arange(12.0).view(3, 4) / 10, "labels": torch.tensor([0, 1, 1])}
FIRST = ["none", "gaussian_noise", "laplace_noise", "dp_sgd", "pruning", "quantization"]


@pytest.mark.parametrize("name", FIRST)
def test_defenses_of_first_order_ask_for_no_input(name: str) -> None:
    defense = make_defense(name)
    assert not defense.facts.needs_input
    gmap = GradientMap(Sounds(), SOUNDS, second_order=False, needs_input=defense.facts.needs_input)
    assert list(defense(gmap)) == ["layer.weight", "layer.bias"]
    check_batch(gmap.model, SOUNDS, needs_input=False)
    assert count_rows(SOUNDS) == 3


@pytest.mark.parametrize("name", ["optimal_noise", "optimal_pruning", "optimal_dp_sgd", "soteria"])
def test_others_say_that_there_is_none(name: str) -> None:
    assert make_defense(name).facts.needs_input
    with pytest.raises(ValueError, match="neither `input_ids` nor `pixel_values`"):
        GradientMap(Sounds(), SOUNDS)
    with pytest.raises(ValueError, match="neither `input_ids` nor `pixel_values`"):
        check_batch(Sounds(), SOUNDS)
    gmap = GradientMap(Sounds(), SOUNDS, second_order=False, needs_input=False)
    with pytest.raises(ValueError, match="made with needs_input=False"):
        make_defense(name)(gmap)


def test_a_chain_asks_if_a_part_does() -> None:
    from hf_gradguard import chain

    noise, pruning = make_defense("gaussian_noise"), make_defense("optimal_pruning")
    assert chain(pruning, noise).facts.needs_input
    assert chain(noise, pruning).facts.needs_input
    assert not chain(noise, noise).facts.needs_input


def test_a_loss_of_no_parameter_is_refused() -> None:
    def detached(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch)["loss"].detach().requires_grad_()

    gmap = GradientMap(Sounds(), SOUNDS, loss_fn=detached, second_order=False, needs_input=False)
    with pytest.raises(ValueError, match=r"not computed from any shared parameter.*Cached"):
        gmap.gradient()
