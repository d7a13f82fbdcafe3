"""Clients with nothing that counts in their batch: no rows, or no labels.

They share noise alone where its strength is stated. Zeros would say that nothing counted, and would
leave a sum with less noise than was stated for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from accelerate import Accelerator
from torch import nn
from transformers import TrainingArguments

from ...defenses import Defense
from ...defenses.noise import NoiseDefense
from ..config import setting
from ..exchange.average import SecureSum, average
from ..message import Client, ClientBatch, MessageMaker


def is_summed(defense: Defense, args: TrainingArguments) -> bool:
    """Return whether a `scale` is stated for the sum of messages.

    A noise multiplier is stated for the sum too, but `PrivateRows` gives each message its part of
    it.

    Example:
        >>> is_summed(make_defense("gaussian_noise"), TrainingArguments("out"))
        False
    """
    summed = setting(args, "noise_for") == "sum"
    return summed and not getattr(defense, "per_sample", False)


class EmptyClients:
    """The messages of a rank's empty clients.

    A message of noise alone counts as much as one of equal weights would. With `summed` it counts
    as much as those that do count on average, on all ranks: a sum of n messages then has all of its
    noise, however few of them count. Their average is known when a step is due.

    Args:
        shared: The function that returns a module's shared parameters, by name.
        summed: Whether noise is stated for the sum of messages.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> from hf_gradguard.training.guards.watch import Ledger
        >>> from hf_gradguard.training.message import Client, ClientBatch, RandomStreams
        >>> from hf_gradguard.training.meter import LeakageMeter
        >>> defense = make_defense("gaussian_noise", scale=0.5)
        >>> meter = LeakageMeter(GradGuardConfig("out"), defense, None)
        >>> messages = MessageMaker(RandomStreams(), meter, Ledger(), share_input_embeddings=False)
        >>> empty = EmptyClients(lambda module: dict(module.named_parameters()), summed=False)
        >>> nobody = ClientBatch(Client(defense), {}, weight=0.0)
        >>> empty.share(messages, model, [nobody], accumulation=1, step=0)
        >>> 0.4 < float(model.bert.pooler.dense.weight.grad.std()) < 0.6
        True
    """

    def __init__(
        self, shared: Callable[[nn.Module], Mapping[str, nn.Parameter]], summed: bool
    ) -> None:
        self._shared, self.summed = shared, summed
        self._waiting: list[Client] = []
        self._weight, self._count = 0.0, 0

    def share(
        self, messages: MessageMaker, module: nn.Module, turns: Sequence[ClientBatch],
        accumulation: int, step: int,
    ) -> None:  # fmt: skip
        """Add the noise of a micro-batch's empty clients, or keep it for `share_sum`.

        Args:
            messages: The maker of messages.
            module: The module whose parameters are shared.
            turns: The batches of all clients in the micro-batch.
            accumulation: The number of micro-batches in the optimizer step.
            step: The number of finished optimizer steps.
        """
        self._weight += sum(turn.weight for turn in turns)
        self._count += sum(bool(turn.weight) for turn in turns)
        # Zeros would say that nothing counted, where others' messages have noise everywhere.
        noisy = [t.client for t in turns if not t.weight and _shares_noise(t.client)]
        if self.summed:
            self._waiting += noisy
            return
        for client in noisy:
            weight = 1 / (len(turns) * accumulation)
            messages.share_noise(self._shared(module), client, weight, step)

    def share_sum(
        self, messages: MessageMaker, module: nn.Module, step: int, accelerator: Accelerator,
        secure: SecureSum | None = None,
    ) -> None:  # fmt: skip
        """Add the noise that was kept, before a step's gradients are exchanged.

        All ranks must call it.

        Args:
            messages: The maker of messages, as for `share`.
            module: The module, as for `share`.
            step: The number of finished steps, as for `share`.
            accelerator: The accelerator that carries the weights and the number of messages that
                count.
            secure: The secure aggregation that hides each rank's.
        """
        weight_and_count = [self._weight, self._count]
        means = torch.tensor(weight_and_count, dtype=torch.float64, device=accelerator.device)
        average([means], accelerator, secure)
        weight, count = means.tolist()
        for client in self._waiting if count else []:
            messages.share_noise(self._shared(module), client, weight / count, step)
        self._waiting, self._weight, self._count = [], 0.0, 0


def _shares_noise(client: Client) -> bool:
    """Whether a client shares noise where it has nothing else to share."""
    defense = client.defense.with_state(client.state)
    return isinstance(defense, NoiseDefense) and defense.stands_alone
