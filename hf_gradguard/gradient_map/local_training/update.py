"""The update that a client sends after some steps of training: the change of its weights.

    x ↦ Δθ(x) = θ_K - θ_0,    θ_k = θ_{k-1} + change(∇_θ L_k(θ_{k-1}, x_k), …)

It is one more function of a client's continuous input, so all that is asked of a gradient's map is
asked of it: defenses change what comes out, attacks go backward through the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..domain import Text, embed
from ..inputs import UnrolledJacobian, find_input, model_loss
from ..map import GradientMap, check_loss
from ..parameters import check_sharding, find_tables, shared_parameters
from ..replay import Replay, RunWithin, differentiate
from ..types import Batch, LossFunction, Tensors
from ..vectorized import Factors
from .batches import Pieces, cut, join
from .optimizers import Optimizer, State, make_optimizer


class UpdateMap(GradientMap):
    """The map from a client's data to the update that its local training would send.

    Constructing it runs the training once, with all that the model's forward passes do: dropout
    draws from the global generator, batch statistics are updated. The weights do not change. Where
    a `GradientMap` says gradient, this says update, **in the weights' unit**: the standard
    deviation of a defense's noise, its clipping bounds and its utility budget are of Δθ. With K
    steps of rate η, Δθ is about ηK times as large as a gradient, and of the other sign.

    Its input holds every batch once: texts under each other, padded to the longest. A batch that is
    given several times (the same object, as for several epochs) is one input. Where epochs shuffle,
    a sample counts as another one in every batch that it is in.

    Parameters that a client withholds are not trained either. Buffers, such as running statistics
    of batch normalization, are no part of an update.

    Args:
        model: The model, as for `GradientMap`.
        batches: The batch of each of the K local steps, in order.
        learning_rate: η, or one of each step.
        optimizer: `"sgd"` or `"adamw"`, with a new state; or one made by `make_optimizer`.
        optimizer_kwargs: The other settings of a named optimizer, as `torch.optim` calls them.
        loss_fn: The loss, as for `GradientMap`.
        share_input_embeddings: Whether to share tables, as for `GradientMap`.
        withhold: Patterns of withheld names, as for `GradientMap`.
        second_order: Whether second derivatives are wanted, as for `GradientMap`.
        needs_input: Whether anything asks for the continuous input, as for `GradientMap`.

    Raises:
        ValueError: If there is no batch, batches do not belong together, learning rates are not
            K numbers above 0, the optimizer is unknown, or `GradientMap` would raise.

    Example:
        >>> update = UpdateMap(model, [batch, batch], learning_rate=0.1).update()
        >>> update.keys() == GradientMap(model, batch).gradient().keys()
        True
    """

    replay: _Steps
    any_rows = False

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        *,
        learning_rate: float | Sequence[float],
        optimizer: str | Optimizer = "sgd",
        optimizer_kwargs: Mapping[str, Any] | None = None,
        loss_fn: LossFunction | None = None,
        share_input_embeddings: bool = False,
        withhold: Sequence[str] = (),
        second_order: bool = True,
        needs_input: bool = True,
    ) -> None:
        check_sharding(model, None, second_order=False)
        self.model, self.loss_fn = model, loss_fn or model_loss
        self._needs_input = needs_input or second_order
        self._share, self._withhold = share_input_embeddings, withhold
        self.optimizer = make_optimizer(optimizer, optimizer_kwargs)
        unique: list[Batch] = []
        self._order: list[int] = []  # of steps, by number in `unique`
        for batch in batches:
            is_known = [batch is known_batch for known_batch in unique]
            self._order.append(is_known.index(True) if any(is_known) else len(unique))
            unique += [] if any(is_known) else [batch]
        self._pieces = Pieces(unique, self._needs_input)
        self.rates = _rates(learning_rate, len(self._order))
        self.batch = self._pieces.joined() if self._needs_input else batches[0]
        self._source = find_input(model, self.batch) if self._needs_input else None
        self.replay = _Steps(model, second_order, f"{self.optimizer}, {len(self._order)} steps")
        with self.replay.kernels():
            for batch in [] if self._share else self._pieces.batches:
                find_tables(model, batch, self.loss_fn)
            self.parameters = shared_parameters(model, self._share, withhold)
        self._runner = RunWithin(model)
        self._batch_inputs: list[Tensor] = []
        losses: list[Tensor] = []
        with torch.enable_grad(), self.replay.kernels():
            self._gradient = self._train(self._pieces.batches, None, losses=losses)
        self._shapes = [batch_input.shape for batch_input in self._batch_inputs]
        self._x = join(self._batch_inputs) if self._needs_input else self._batch_inputs[0]
        self._loss = torch.stack(losses).mean()
        self._jacobian = UnrolledJacobian(
            lambda x: self.gradient_at(x, create_graph=True), self._x, self.parameters, self.replay
        )

    @property
    def steps(self) -> int:
        """The number K of steps."""
        return len(self._order)

    def update(self) -> Tensors:
        """Return Δθ, which plain local training would send; the same as `gradient()`."""
        return dict(self.gradient())

    def evaluate(self, x: Tensor, entries: Mapping[str, Any] | None = None) -> Tensor:
        """Return the mean loss of the batches at another input, before any step."""
        batches = self._pieces.split({**self.batch, **(entries or {})})
        batch_inputs = cut(x, self._pieces.rows, self._shapes)
        losses = [
            self._run(batch, batch_input)[1]
            for batch, batch_input in zip(batches, batch_inputs, strict=True)
        ]
        return torch.stack(losses).mean()

    def gradient_at(self, x: Tensor, create_graph: bool = False, **entries: Tensor) -> Tensors:
        """Return Δθ at another input; arguments as for `GradientMap.gradient_at`.

        Entries have the form of `batch`.

        Raises:
            ValueError: If the shape differs.
        """
        if x.shape != (shape := self.input.shape):
            raise ValueError(
                f"x has shape {tuple(x.shape)}, but this training's input has {tuple(shape)}."
            )
        if create_graph:
            self._require_second_order("gradient_at(create_graph=True)")
            self.replay.check_differentiable()
        batches = self._pieces.split({**self.batch, **entries})
        with self.replay.run():
            batch_inputs = cut(x, self._pieces.rows, self._shapes)
            return self._train(batches, batch_inputs, create_graph)

    def slopes_at(
        self,
        function: Callable[[Mapping[str, Tensor | Factors], Tensors], Tensor],
        xs: Tensor,
        extras: Tensors,
        *,
        factored: bool = False,
        **entries: Tensor,
    ) -> tuple[Tensor, Tensor, Tensors]:
        """Return what `GradientMap.slopes_at` does, one candidate at a time and without factors."""
        values, slopes, entry_slopes = [], [], []
        names = [key for key, entry in entries.items() if entry.is_floating_point()]
        for number, candidate in enumerate(xs):
            x = candidate.detach().requires_grad_()
            candidate_entries = {key: entry[number].detach() for key, entry in entries.items()}
            leaves = [candidate_entries[name].requires_grad_() for name in names]
            gradient = self.gradient_at(x, create_graph=True, **candidate_entries)
            with torch.enable_grad():
                value = function(gradient, {name: extra[number] for name, extra in extras.items()})
            slope, *slopes_of_candidate = self.input_gradient(value, x, *leaves)
            values.append(value.detach())
            slopes.append(slope)
            entry_slopes.append(slopes_of_candidate)
        by_leaf = [
            torch.stack(slopes_of_entry) for slopes_of_entry in zip(*entry_slopes, strict=True)
        ]
        return torch.stack(values), torch.stack(slopes), dict(zip(names, by_leaf, strict=True))

    def of_batch(self, batch: Batch, second_order: bool = False) -> UpdateMap:
        """Return the same training, with the same random draws, on another batch like `batch`."""
        return self._of(self._pieces.split(batch), second_order, self._needs_input)

    def on_other_data(self, replaced: Callable[[Batch], Batch]) -> UpdateMap:
        pieces = [replaced(batch) for batch in self._pieces.batches]
        return self._of(pieces, needs_input=self._needs_input)

    def with_input(self) -> UpdateMap:
        return self if self._needs_input else self._of(self._pieces.batches, needs_input=True)

    def _of(
        self, pieces: Sequence[Batch], second_order: bool = False, needs_input: bool = True
    ) -> UpdateMap:
        with self.replay.draws():
            return type(self)(
                self.model,
                [pieces[index] for index in self._order],
                learning_rate=self.rates,
                optimizer=self.optimizer,
                loss_fn=self.loss_fn,
                second_order=second_order,
                needs_input=needs_input,
                share_input_embeddings=self._share,
                withhold=self._withhold,
            )

    def outcome(self, weights: Tensors, change: Tensors) -> Tensors:
        """Return what is sent, given the weights before training and their change."""
        return change

    def _train(
        self,
        batches: Sequence[Batch],
        batch_inputs: Sequence[Tensor] | None,
        create_graph: bool = False,
        losses: list[Tensor] | None = None,
    ) -> Tensors:
        """The change of the weights, kept apart from them: beside them it would be rounded off."""
        # Computed, not written to the model: a step is a function of the weights before it.
        start_weights = {name: p.detach() for name, p in self.parameters.items()}
        change = {name: torch.zeros_like(p) for name, p in start_weights.items()}
        state: State = {}
        batch_inputs_by_index: dict[int, Tensor] = {}
        for step, (index, rate) in enumerate(zip(self._order, self.rates, strict=True), 1):
            weights = {name: start_weights[name] + change[name] for name in start_weights}
            # Without a graph, each step starts from leaves, so that no earlier step is kept alive.
            if not create_graph:
                weights = {name: w.detach() for name, w in weights.items()}
            for weight in weights.values():
                weight.requires_grad_()
            batch_input = None if batch_inputs is None else batch_inputs[index]
            gradient, loss, x = self._step(
                weights, batches[index], batch_input, index, create_graph
            )
            batch_inputs_by_index.setdefault(index, x.detach())
            if losses is not None:
                losses.append(loss.detach())
            with torch.set_grad_enabled(create_graph):
                step_change, state = self.optimizer.change(weights, gradient, state, rate, step)
                change = {name: change[name] + step_change[name] for name in change}
        # Only the first training of all has no inputs given: theirs are the map's own.
        if not self._batch_inputs:
            self._batch_inputs = [batch_inputs_by_index[index] for index in range(len(batches))]
        return self.outcome(start_weights, change)

    def _moved(self, index: int, batch_input: Tensor, batch: Batch) -> Tensor:
        """Return the input of a batch at the present weights.

        Where the embedding table is trained too, the input moves with it.
        """
        domain, embedding = self.domain, self.embedding
        if embedding is None or not self._share:
            return batch_input
        assert isinstance(domain, Text)
        # The input is a point, and not ids: only its distance from the table's rows is given.
        embedded = [embed(embedding, ids) for ids in domain.texts(batch).values()]
        return torch.cat(embedded, 1) + (batch_input - self._batch_inputs[index])

    def _step(
        self,
        weights: Tensors,
        batch: Batch,
        batch_input: Tensor | None,
        index: int,
        create_graph: bool,
    ) -> tuple[Tensors, Tensor, Tensor]:
        """Return the gradient at some weights, the loss and the input.

        The loss is differentiated while the weights are the model's, since layers under activation
        checkpointing run again then.
        """

        def run() -> tuple[Tensors, Tensor, Tensor]:
            value = None if batch_input is None else self._moved(index, batch_input, batch)
            x, loss = self._run(batch, value)
            check_loss(loss)
            return differentiate(loss, weights, create_graph=create_graph), loss, x

        named_weights = {f"model.{name}": weight for name, weight in weights.items()}
        outcome: tuple[Tensors, Tensor, Tensor] = torch.func.functional_call(
            self._runner, named_weights, (run,)
        )
        return outcome


class MeanGradientMap(UpdateMap):
    """An update in a gradient's unit: the mean over the steps of what training by SGD adds up.

        (a θ_0 - θ_K) / C,    θ_K = a θ_0 - Σ_k c_k g_k,    C = Σ_k c_k.

    With one step of plain SGD it is the gradient.

        (a θ_0 - θ_K) / C,    θ_K = a θ_0 - Σ_k c_k g_k,    C = Σ_k c_k.

    With one step of plain SGD it is the gradient.

    Example:
        >>> one = MeanGradientMap(model, [batch], learning_rate=0.1)
        >>> same = GradientMap(model, batch).gradient()["classifier.bias"]
        >>> bool(torch.allclose(one.gradient()["classifier.bias"], same))
        True
    """

    def outcome(self, weights: Tensors, change: Tensors) -> Tensors:
        return mean_gradient(self.optimizer, self.rates, weights, change)


def mean_gradient(
    optimizer: Optimizer, rates: Sequence[float], weights: Tensors, change: Tensors
) -> Tensors:
    """Return the mean gradient behind a change of weights; see `MeanGradientMap`.

    For AdamW it is the mean of the normalized directions.

    Args:
        optimizer: The optimizer of the local training.
        rates: One rate a step.
        weights: The weights before training.
        change: The change of the weights.

    Example:
        >>> weights, change = {"w": torch.ones(2)}, {"w": torch.full((2,), -0.5)}
        >>> mean_gradient(make_optimizer("sgd"), [0.1, 0.1], weights, change)["w"]
        tensor([2.5000, 2.5000])
    """
    # Weight decay shrinks the start as well: what is left of it has to be taken out first.
    decay, total = optimizer.linear(list(rates))
    if decay == 1:
        return {name: -delta / total for name, delta in change.items()}
    return {name: ((decay - 1) * weights[name] - delta) / total for name, delta in change.items()}


class _Steps(Replay):
    """Of several steps."""

    def __init__(self, model: nn.Module, second_order: bool, kind: str) -> None:
        super().__init__(model, second_order)
        self.kind = kind

    def recomputes(self) -> bool:
        """Layers run once per step: what they do in one of them does not tell samples apart."""
        return True

    def check_differentiable(self) -> None:
        """Raise where second derivatives would be of other weights."""
        if super().recomputes():
            raise RuntimeError(
                "Local training is not differentiated under activation checkpointing: layers would "
                "run again with the weights of the start. Call "
                "model.gradient_checkpointing_disable(), or take a defense that differentiates "
                "once."
            )


def _rates(learning_rate: float | Sequence[float], steps: int) -> list[float]:
    rates = (
        [float(rate) for rate in learning_rate]
        if isinstance(learning_rate, Sequence)
        else [float(learning_rate)] * steps
    )
    if len(rates) != steps or not all(0 < rate < float("inf") for rate in rates):
        raise ValueError(
            f"learning_rate must be a finite number above 0, or one for each of {steps} steps, but "
            f"is {learning_rate!r}."
        )
    return rates
