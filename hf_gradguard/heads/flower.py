"""A private head trained by Flower's clients. It needs `pip install 'hf-gradguard[flower]'`.

    app = head_app(make_client)

The app answers with one protected message a round, and sends nothing else: no losses, no numbers
of rows, and no errors that quote them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ..federation.flower import arrays_in, later_state, record_of, tensors_of
from .client import HeadClient, check_received, weights_name
from .head import PrivateHead

try:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
except ImportError as error:
    raise ImportError(
        "hf_gradguard.heads.flower needs Flower: pip install 'hf-gradguard[flower]'"
    ) from error

logger = logging.get_logger(__name__)

STATE = "gradguard.head"


def head_app(make_client: Callable[[Context], HeadClient]) -> ClientApp:
    """Return an app of clients that train a private head.

    To a train message it answers with `HeadClient.train`, weighed as one of as many examples as all
    others, and with ε. What a client remembers is in `context.state`. To the evaluate message of
    the last round it answers nothing, and saves the head in the folder that the node's own
    configuration calls `output`, if there is one. Any other message is refused.

    Args:
        make_client: The function that makes a node's client, of rows that the node alone has. It is
            called once for each run.

    Raises:
        RuntimeError: If anything fails. The node's own log says what, and the server is not told:
            an error may quote a row.

    Example:
        >>> from hf_gradguard.heads import HeadClient, private_head
        >>> head = private_head(model, public_texts, num_labels=2, processing_class=tokenizer)
        >>> rows = [{"text": text, "label": place % 2} for place, text in enumerate(texts)]
        >>> app = head_app(lambda context: HeadClient(head, rows, messages=2))
        >>> message = Message(RecordDict({"arrays": head_arrays(head)}), 1, "train")
        >>> list(app(message, context).content["metrics"])
        ['num-examples', 'epsilon']
    """
    app = ClientApp()
    clients: dict[tuple[int, int], HeadClient] = {}

    def client_of(context: Context) -> HeadClient:
        node = context.run_id, context.node_id
        if node not in clients:
            clients[node] = make_client(context)
        return clients[node]

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _privately(_train, client_of, message, context)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return _privately(_save, client_of, message, context)

    return app


def _privately(
    act: Callable[[HeadClient, Message, Context], RecordDict],
    client_of: Callable[[Context], HeadClient],
    message: Message,
    context: Context,
) -> Message:
    """Return the answer to a message, or an error that says nothing.

    Raises:
        RuntimeError: If it fails, since Flower sends the text of any error to the server.
    """
    try:
        return Message(act(client_of(context), message, context), reply_to=message)
    except Exception as error:
        logger.error(f"Nothing was sent: {error}", exc_info=error)
    raise RuntimeError("Nothing was sent. This node's own log says why.")


def _train(client: HeadClient, message: Message, context: Context) -> RecordDict:
    if STATE in context.state:
        in_memory = client.state_dict() if client.position else None
        stored = tensors_of(context.state[STATE])
        client.load_state_dict(later_state(stored, in_memory, "This node's memory or folder"))
    answer = client.train(_received(message))
    context.state[STATE] = record_of(client.state_dict())
    numbers: dict[str, Any] = {"num-examples": 1}
    if client.epsilon is not None:
        numbers["epsilon"] = client.epsilon
    return RecordDict({"arrays": record_of(answer), "metrics": MetricRecord(numbers)})


def _save(client: HeadClient, message: Message, context: Context) -> RecordDict:
    """Save the head of the last round."""
    rounds = [record.get("server-round", 0) for record in message.content.config_records.values()]
    folder = context.node_config.get("output")
    if folder and max(rounds, default=0) >= client.messages:
        load_head_arrays(client.head, _record_in(message))
        client.head.save_pretrained(str(folder))
        card = f"{client.head.describe_for_card()}\n\n## Privacy\n\n{client.describe()}\n"
        (Path(str(folder)) / "README.md").write_text(card, encoding="utf-8")
    return RecordDict({"metrics": MetricRecord({"num-examples": 1})})


def _received(message: Message) -> dict[str, torch.Tensor]:
    return tensors_of(_record_in(message))


def _record_in(message: Message) -> ArrayRecord:
    records = list(arrays_in(message).values())
    if len(records) != 1:
        raise ValueError(f"{len(records)} records of arrays were received, and not the head's.")
    return records[0]


def head_arrays(head: PrivateHead) -> ArrayRecord:
    """Return the weights of a head as the arrays with which a strategy starts.

    Args:
        head: The head.

    Example:
        >>> from hf_gradguard.heads import private_head
        >>> head = private_head(torch.nn.Identity(), torch.eye(9), num_labels=2)
        >>> [array.shape for array in head_arrays(head).values()]
        [(2, 9)]
    """
    return record_of({weights_name(head): head.head.weight.detach()})


def load_head_arrays(head: PrivateHead, arrays: ArrayRecord) -> None:
    """Give a head the weights that a strategy returned, or that a message has.

    Args:
        head: The head.
        arrays: The arrays, as of `head_arrays`.

    Raises:
        ValueError: If they are of another head.

    Example:
        >>> from hf_gradguard.heads import private_head
        >>> head = private_head(torch.nn.Identity(), torch.eye(9), num_labels=2)
        >>> load_head_arrays(head, head_arrays(head))
    """
    weights = check_received(head, tensors_of(arrays))
    with torch.no_grad():
        head.head.weight.copy_(weights)


__all__ = ["head_app", "head_arrays", "load_head_arrays"]
