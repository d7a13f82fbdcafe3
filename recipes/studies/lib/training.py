"""Steps of plain trainings."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer


def learn(model: nn.Module, optimizer: Optimizer, batch: Mapping[str, Tensor]) -> None:
    """One step on a batch."""
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def take_mean(model: nn.Module, messages: Sequence[Mapping[str, Tensor]]) -> None:
    """Gradients become the mean of what clients share."""
    for name, parameter in model.named_parameters():
        parameter.grad = sum(message[name] for message in messages) / len(messages)
