"""Private heads through Flower: what a node answers, remembers and saves."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import example_names
from transformers import AutoModelForSequenceClassification, pipeline

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from hf_gradguard.federation.flower import record_of, tensors_of
from hf_gradguard.heads import HeadClient, PrivateHead, private_head
from hf_gradguard.heads.client import weights_name
from hf_gradguard.heads.flower import head_app, head_arrays, load_head_arrays
from hf_gradguard.testing.flower import run_in_process

PUBLIC = ["a good film", "a bad film", "the plot is slow", "it is a joke", "very warm", "dull"]


@pytest.fixture(autouse=True)
def _task() -> None:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


def make_head() -> PrivateHead:
    names = example_names("model tokenizer")
    return private_head(
        names["model"], PUBLIC, labels=["bad", "good"], processing_class=names["tokenizer"]
    )


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"text": f"{PUBLIC[n % 6]} very", "label": n % 2} for n in range(count)]


def context(**config: Any) -> Context:
    return Context(run_id=1, node_id=7, node_config=config, state=RecordDict(), run_config={})


def train_message(head: PrivateHead, **more: Any) -> Message:
    content = RecordDict({"arrays": head_arrays(head), **more})
    return Message(content, dst_node_id=7, message_type="train")


def answered(reply: Message) -> torch.Tensor:
    (tensor,) = tensors_of(reply.content["arrays"]).values()
    return tensor


def test_three_sites_train_one_head_that_pipelines_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each begins with the head that one of them has saved, and ends with the same one."""
    start = make_head()
    start.save_pretrained(tmp_path / "start")

    def make_client(context: Context) -> HeadClient:
        head = AutoModelForSequenceClassification.from_pretrained(tmp_path / "start")
        return HeadClient(head, rows_of(context.node_config["rows"]), messages=5)

    server, results = ServerApp(), []

    @server.main()
    def main(grid: Any, _context: Context) -> None:
        strategy = FedAvg(min_available_nodes=3)
        results.append(strategy.start(grid, head_arrays(start), num_rounds=5))

    nodes = [{"rows": n, "output": str(tmp_path / f"site-{n}")} for n in (8, 12, 20)]
    grid = run_in_process(head_app(make_client), server, nodes)
    (result,) = results
    assert [record["epsilon"] for record in result.train_metrics_clientapp.values()] == [
        pytest.approx(2.754, abs=2e-3)
    ] * 5
    assert "ε = 2.754 at δ = 1e-05" in caplog.text
    assert all("gradguard.head" in context.state for context in grid.contexts.values())
    load_head_arrays(start, result.arrays)
    assert start.head.weight.norm() > 1
    for number in (8, 12, 20):
        folder = tmp_path / f"site-{number}"
        saved = AutoModelForSequenceClassification.from_pretrained(folder)
        assert torch.equal(saved.head.weight, start.head.weight)
        (found,) = pipeline("text-classification", model=str(folder))(["a good film"])
        scores = start(features=start.features_of(["a good film"])).logits.softmax(1)[0]
        assert found["score"] == pytest.approx(scores.max().item(), rel=1e-4)
        assert "ε = 2.754" in (folder / "README.md").read_text()


def test_an_answer_has_a_message_and_two_numbers() -> None:
    head = make_head()
    client = HeadClient(head, rows_of(12), messages=3)
    reply = head_app(lambda _: client)(train_message(head), context())
    assert list(reply.content) == ["arrays", "metrics"]
    assert list(reply.content["arrays"]) == [weights_name(head)]
    numbers = dict(reply.content["metrics"])
    assert numbers == {"num-examples": 1, "epsilon": client.epsilon}
    assert answered(reply).norm() > 0


def test_an_error_tells_the_server_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Flower sends an error's text, and one may quote a row."""

    def make_client(_context: Context) -> HeadClient:
        raise ValueError("row 5 has the label 'secret'")

    with pytest.raises(RuntimeError, match="own log says why") as caught:
        head_app(make_client)(train_message(make_head()), context())
    told = f"{caught.value} {caught.value.__cause__} {caught.value.__context__}"
    assert "secret" not in told
    assert "secret" in caplog.text


def test_a_new_process_goes_on_where_the_context_is() -> None:
    head, node = make_head(), context()
    answers, clients = [], []
    for _ in range(3):
        clients.append(HeadClient(head, rows_of(12), messages=3))
        app = head_app(lambda _: clients[-1])
        answers.append(answered(app(train_message(head), node)))
        node = copy.deepcopy(node)
    assert [client.position for client in clients] == [1, 2, 3]
    orders = [[part.tolist() for part in client.order()] for client in clients]
    assert orders[0] == orders[1] == orders[2]
    with pytest.raises(RuntimeError, match="own log"):
        app(train_message(head), node)


def test_an_older_context_repeats_no_message() -> None:
    head, node = make_head(), context()
    client = HeadClient(head, rows_of(12), messages=3)
    app = head_app(lambda _: client)
    app(train_message(head), node)
    older = copy.deepcopy(node)
    app(train_message(head), node)
    app(train_message(head), older)
    assert client.position == 3


@pytest.mark.parametrize("case", ["two records", "another head", "no arrays", "a query"])
def test_a_server_that_asks_for_more_gets_nothing(case: str) -> None:
    head = make_head()
    client = HeadClient(head, rows_of(12), messages=3)
    message = train_message(head)
    if case == "two records":
        message = train_message(head, more=head_arrays(head))
    elif case == "another head":
        message.content["arrays"] = record_of({"head.weight": head.head.weight.detach()})
    elif case == "no arrays":
        del message.content["arrays"]
    else:
        message = Message(RecordDict(), dst_node_id=7, message_type="query")
    app = head_app(lambda _: client)
    with pytest.raises((RuntimeError, ValueError)):
        app(message, context())
    assert client.position == 0
    assert client.head.head.weight.norm() == 0


def test_an_evaluation_answers_with_nothing_and_saves_the_last_round_alone(tmp_path: Path) -> None:
    head = make_head()
    app = head_app(lambda _: HeadClient(head, rows_of(12), messages=3))
    for number in (2, 3):
        content = {"arrays": head_arrays(head), "config": ConfigRecord({"server-round": number})}
        message = Message(RecordDict(content), dst_node_id=7, message_type="evaluate")
        reply = app(message, context(output=str(tmp_path / "out")))
        assert dict(reply.content["metrics"]) == {"num-examples": 1}
        assert list(reply.content) == ["metrics"]
        assert (tmp_path / "out" / "model.safetensors").exists() == (number == 3)


def test_nodes_with_the_same_rows_have_other_noise() -> None:
    head = make_head()
    messages = []
    for _ in range(2):
        app = head_app(lambda _: HeadClient(head, rows_of(12), messages=1))
        messages.append(answered(app(train_message(head), context())))
    assert (messages[0] - messages[1]).norm() > 0.5 * messages[0].norm()
