"""What an update takes on the wire, whole and packed: bytes of Flower's own messages.

A client app with the mod answers a server's message, in this process. Its reply is taken apart into
the objects that Flower sends, counted, put together again, and averaged by a strategy that unpacks.
Both ways have to end with the same weights, to the last bit. Needs `hf-gradguard[flower]`.
"""

import torch

from hf_gradguard.federation import UpdateMap
from hf_gradguard.federation.packing import pack, unpack

from .measuring import classifier, random_batch, seconds_now

BATCH, LENGTH, STEPS, RATE = 16, 16, 4, 0.01
CASES = {
    "`gaussian_noise`": ("gaussian_noise", {"scale": 1e-3}),
    "`pruning`, 90 %": ("pruning", {"ratio": 0.9}),
    "`pruning`, 99 %": ("pruning", {"ratio": 0.99}),
    "`pruning`, 99.9 %": ("pruning", {"ratio": 0.999}),
    "`quantization`, 8 bits": ("quantization", {"bits": 8}),
    "`quantization`, 4 bits": ("quantization", {"bits": 4}),
    "`quantization`, 1 bit": ("quantization", {"bits": 1}),
    "`quantization`, signs": ("quantization", {"sign_only": True}),
}


def measure(args) -> dict:
    from flwr.supercore.task_identity import TaskIdentity

    # What a process of Flower's knows of itself before it makes messages.
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    model = classifier(args.model)
    batch = random_batch(model, 2 if args.quick else BATCH, LENGTH)
    update = UpdateMap(model, [batch] * STEPS, learning_rate=RATE).update()
    parameters = dict(model.named_parameters())
    start = {name: parameters[name].detach().clone() for name in update}
    trained = {name: start[name] + change for name, change in update.items()}
    cases = {label: _case(start, trained, *case) for label, case in CASES.items()}
    return {"entries": sum(map(torch.numel, start.values())), "cases": cases}


def _case(start: dict, trained: dict, defense: str, settings: dict) -> dict:
    """Bytes and seconds of a message, whole and packed."""
    report, averages = {}, {}
    for kind in ("whole", "packed"):  # the second is timed
        config = {"defense": defense, "packed": kind == "packed", "share-input-embeddings": True}
        config |= {f"{defense}.{name}": setting for name, setting in settings.items()}
        averages[kind], report[kind], sent = _round(start, trained, config)
    if defense != "gaussian_noise":  # whose noise is another each time
        for name, average in averages["whole"].items():
            if not torch.equal(average, averages["packed"][name]):
                raise RuntimeError(f"{name} is another one when it was packed.")
    began = seconds_now()
    update = {name: unpack(name, tensor, start[name]) for name, tensor in sent.items()}
    unpacked = seconds_now()
    for tensor in update.values():
        pack(tensor)
    seconds = {"unpack": unpacked - began, "pack": seconds_now() - unpacked}
    return report | {
        "share": report["packed"] / report["whole"],
        "seconds": {name: round(taken, 2) for name, taken in seconds.items()},
    }


def _round(start: dict, trained: dict, config: dict) -> tuple[dict, int, dict]:
    """The server's average of one client, and the bytes of its reply and its arrays."""
    from flwr.app import Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    from hf_gradguard.federation.flower import MergeByName, gradguard_mod, record_of, tensors_of

    class Merging(MergeByName, FedAvg):
        """As a server has it whose clients pack."""

    app = ClientApp(mods=[gradguard_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 1})
        content = {"arrays": record_of(trained), "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)

    named = {f"gradguard.{name}": setting for name, setting in config.items()}
    context = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config=named)
    question = Message(
        RecordDict({"arrays": record_of(start)}), dst_node_id=2, message_type="train"
    )
    reply = app(question, context)
    sent = tensors_of(reply.content.array_records["arrays"])
    contents = {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
    arrived = inflate_object_from_contents(reply.object_id, dict(contents))
    arrived.metadata.__dict__["_src_node_id"] = 2
    strategy = Merging()
    strategy._all_arrays = record_of(start)
    arrays, _ = strategy.aggregate_train(1, [arrived])
    return tensors_of(arrays), sum(map(len, contents.values())), sent


def table(report: dict) -> tuple[list[str], list]:
    entries = report["entries"]
    header = [
        f"update of {entries:,} entries", "bytes, whole", "bytes, packed", "of the whole",
        "bits an entry", "to pack, s", "to unpack, s",
    ]  # fmt: skip
    rows = []
    for label, case in report["cases"].items():
        counts = f"{case['whole']:,}", f"{case['packed']:,}"
        bits = f"{8 * case['packed'] / entries:.3f}"
        seconds = [f"{case['seconds'][name]:.2f}" for name in ("pack", "unpack")]
        rows.append((label, *counts, f"{case['share']:.2%}", bits, *seconds))
    return header, rows
