"""A client: trains on its own rows, and sends a protected update."""

import time
from itertools import islice

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp

from hf_gradguard.federation import protect_update
from hf_gradguard.federation.flower import ClientGuard, gradguard_mod, tensors_of

from .task import Task


def secure_mod(message: Message, context: Context, call_next) -> Message:
    """Flower's SecAgg+, if the run asks for it."""
    if context.run_config["secure-aggregation"]:
        return secaggplus_mod(message, context, call_next)
    return call_next(message, context)


app = ClientApp(mods=[secure_mod, gradguard_mod])


@app.train()
def train(message: Message, context: Context) -> Message:
    """K local steps from the weights received. The defense sees the client's data, so that every
    defense can be chosen; the mod lets pass what the guard made, and nothing else.
    """
    ((key, received),) = message.content.array_records.items()
    task, config = Task(context.run_config), context.run_config
    model = task.model()
    names = [name for name, _ in model.named_parameters()]
    load(model, received)

    guard = ClientGuard(context)
    guard.defense.prepare(model, task.tokenizer)
    node = context.node_config
    batches = task.batches(node["partition-id"], node["num-partitions"], seed=visits(context))
    start = time.process_time()
    update = protect_update(
        model,
        list(islice(batches, config["local-steps"])),
        guard.defense,
        learning_rate=config["learning-rate"],
        optimizer=config["optimizer"],
    )
    seconds = time.process_time() - start
    remember(context, seconds)

    if key != "fitins.parameters":
        arrays = guard.arrays(received, update)
        numbers = {"num-examples": 1, "seconds": seconds}
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord(numbers)}),
                       reply_to=message)  # fmt: skip
    # Secure aggregation speaks Flower's older language, in which arrays have numbers for names.
    numbered = {str(names.index(name)): tensor for name, tensor in update.items()}
    content = RecordDict(
        {
            "fitres.parameters": guard.arrays(received, numbered),
            "fitres.num_examples": MetricRecord({"num_examples": 1}),
            "fitres.metrics": ConfigRecord({"seconds": seconds}),
            "fitres.status": ConfigRecord({"code": 0, "message": "Success"}),
        }
    )
    return Message(content, reply_to=message)


def load(model, received: ArrayRecord) -> None:
    """Weights by name, or in their order. Names that a server never sends stay as they are."""
    parameters, tensors = dict(model.named_parameters()), tensors_of(received)
    if not parameters.keys() >= tensors.keys():
        tensors = dict(zip(parameters, tensors.values(), strict=True))
    for name, tensor in tensors.items():
        parameters[name].data.copy_(tensor)


def visits(context: Context) -> int:
    """How many rounds this node has trained in, so that each has other rows."""
    return len(context.state["times"]["all"]) if "times" in context.state else 0


def remember(context: Context, seconds: float) -> None:
    """What a round took of the processor, in the node's own state."""
    before = list(context.state["times"]["all"]) if "times" in context.state else []
    context.state["times"] = MetricRecord({"all": [*before, seconds]})
