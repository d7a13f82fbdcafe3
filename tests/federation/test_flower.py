"""The Flower mod: on by default, off only when told, set by the run, closed when in doubt."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_task
from torch import Tensor

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from secagg_driver import run_secagg

from hf_gradguard.federation import protect_update
from hf_gradguard.federation.flower import (
    STATE,
    ClientGuard,
    MergeByName,
    gradguard_mod,
    record_of,
    tensors_of,
    unpack_reply,
)
from hf_gradguard.federation.packing import is_packed
from hf_gradguard.gradient_map.views import PrecomputedGradient

START = {"layer.weight": torch.linspace(-1, 1, 600).view(20, 30), "layer.bias": torch.ones(20)}
STEP = {
    name: 0.01 * torch.cos(torch.arange(t.numel()).float()).view_as(t) for name, t in START.items()
}
TRAINED = {name: START[name] + STEP[name] for name in START}
SCALED: dict[str, Any] = {"settings__scale": 0.01}  # of Gaussian noise


@pytest.fixture(autouse=True)
def _task() -> None:
    """What a process of Flower's knows of itself before it makes messages."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


def context(**config: Any) -> Context:
    defense = config.get("defense", "gaussian_noise")
    named = {
        f"gradguard.{key.replace('settings__', f'{defense}.')}": value
        for key, value in config.items()
    }
    return Context(
        run_id=1, node_id=7, node_config={}, state=RecordDict(), run_config={"rounds": 3, **named}
    )


def message(kind: str = "train", **records: Any) -> Message:
    content = RecordDict(records or {"arrays": record_of(START)})
    return Message(content, dst_node_id=7, message_type=kind)


def app(answer: dict[str, Any] | Callable[..., Any], mods: Any = (gradguard_mod,)) -> ClientApp:
    """An app that answers with these records."""
    made = ClientApp(mods=list(mods))

    def reply(message: Message, context: Context) -> Message:
        content = answer(message, context) if callable(answer) else answer
        return Message(RecordDict(content), reply_to=message)

    made.train()(reply)
    made.evaluate()(reply)
    made.query()(reply)
    return made


def plain(**more: Any) -> dict[str, Any]:
    return {
        "arrays": record_of(TRAINED),
        "metrics": MetricRecord({"num-examples": 5, "loss": 0.25}),
        **more,
    }


def sent(reply: Message, key: str = "arrays") -> dict[str, Tensor]:
    return tensors_of(reply.content.array_records[key])


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(sum((one[name] - other[name]).square().sum() for name in other)) ** 0.5


# On by default


def test_without_settings_nothing_is_sent() -> None:
    """It is on, and noise relative to an update would show the update's norm."""
    with pytest.raises(ValueError, match=r"gradguard\.gaussian_noise\.scale"):
        app(plain())(message(), context())


def test_with_its_scale_alone_noise_is_on() -> None:
    reply = app(plain())(message(), context(**SCALED))
    found = sent(reply)
    assert found.keys() == START.keys()
    size = 0.01 * 620**0.5
    # Of 620 draws the norm is within a tenth but for one in 10⁻³.
    assert 0.85 * size < distance(found, TRAINED) < 1.15 * size
    assert dict(reply.content.metric_records["metrics"]) == {"num-examples": 5, "loss": 0.25}
    again = sent(app(plain())(message(), context(**SCALED)))
    assert distance(found, again) > size  # no seed that somebody knows


def test_values_are_those_of_the_defense() -> None:
    found = sent(app(plain())(message(), context(defense="pruning", settings__ratio=0.75)))
    changed = torch.cat([(found[name] - START[name]).flatten() for name in START])
    assert int((changed != 0).sum()) == 620 - 465
    whole = torch.cat([(TRAINED[name] - START[name]).flatten() for name in START])
    largest = whole.abs() >= whole.abs().sort().values[465]
    torch.testing.assert_close(changed[largest], whole[largest], rtol=0, atol=2e-7)


# Off only when told


def test_opting_out_is_explicit(caplog: pytest.LogCaptureFixture) -> None:
    off = context(defense="none")
    assert distance(sent(app(plain())(message(), off)), TRAINED) == 0
    assert "sent as it is" in caplog.text
    for wrong in ("None", "off", "", "gaussian"):
        with pytest.raises(ValueError, match="gaussian_noise"):
            app(plain())(message(), context(defense=wrong))


# Configured by the run


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"defence": "pruning"}, r"no 'gradguard\.defence'"),
        ({"settings": 3}, r"no 'gradguard\.settings'"),
        ({"pruning": 3}, r"no 'gradguard\.pruning'"),
        ({"withheld": "no"}, "'zeros' or 'left out'"),
        ({"sends": "gradient"}, "'weights' or 'difference'"),
        ({"share-input-embeddings": "yes"}, "true or false"),
        ({"packed": "yes"}, "true or false"),
        ({"defense": "pruning", "settings__ratio": 2.0}, "below 1"),
    ],
)
def test_a_wrong_setting_stops_before_training(config: dict[str, Any], words: str) -> None:
    ran = []
    with pytest.raises(ValueError, match=words):
        app(lambda *_: ran.append(1))(message(), context(**config))
    assert not ran


def test_settings_of_other_defenses_may_stay() -> None:
    here = context(defense="none", **{"pruning.ratio": 0.5})
    assert distance(sent(app(plain())(message(), here)), TRAINED) == 0


def test_a_setting_that_the_defense_lacks_stops() -> None:
    with pytest.raises(TypeError, match="sigma"):
        app(plain())(message(), context(settings__sigma=1.0))


# Closed when in doubt

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a name too many": (plain(arrays=record_of(TRAINED | {"x": torch.ones(2)})), "'x' was not"),
    "a name missing": (plain(arrays=record_of({"layer.bias": START["layer.bias"]})), "is missing"),
    "another shape": (
        plain(arrays=record_of(TRAINED | {"layer.bias": torch.ones(21)})), "has shape",
    ),
    "another type": (
        plain(arrays=record_of(TRAINED | {"layer.bias": torch.ones(20).double()})), "has type",
    ),
    "the difference itself": (plain(arrays=record_of(STEP)), "sends = 'difference'"),
    "two records": (plain(more=record_of(TRAINED)), "2 were to be sent"),
    "no weights": ({"metrics": MetricRecord({"loss": 1.0})}, "0 were to be sent"),
    "a list of numbers": (plain(metrics=MetricRecord({"losses": [0.1, 0.2]})), "'losses', a list"),
    "text": (plain(notes=ConfigRecord({"text": "patient 7"})), "'text', a str"),
    "bytes": (plain(notes=ConfigRecord({"raw": b"pixels"})), "'raw', a bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_difference_of_weights_is_refused(case: str) -> None:
    answer, words = WRONG[case]
    here = context()
    with pytest.raises(ValueError, match=words):
        app(answer)(message(), here)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(value: float) -> None:
    broken = plain(arrays=record_of(TRAINED | {"layer.bias": torch.full((20,), value)}))
    with pytest.raises(FloatingPointError, match=r"layer\.bias"):
        app(broken)(message(), context())


def test_an_error_of_the_app_tells_the_server_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Flower sends an error's text to the server, and one may quote a row."""

    def fail(_message: Message, _context: Context) -> dict[str, Any]:
        raise KeyError("patient 7")

    with pytest.raises(RuntimeError, match="own log says why") as caught:
        app(fail)(message(), context(**SCALED))
    assert "patient" not in f"{caught.value} {caught.value.__cause__} {caught.value.__context__}"
    assert "patient 7" in caplog.text
    with pytest.raises(KeyError, match="patient 7"):
        app(fail)(message(), context(defense="none"))


def test_an_app_that_trains_the_received_arrays_in_place_is_refused() -> None:
    def train(message: Message, _context: Context) -> dict[str, Any]:
        record = message.content.array_records["arrays"]
        for name, tensor in TRAINED.items():
            record[name] = Array(tensor.numpy())
        return plain()

    with pytest.raises(ValueError, match="Train a copy"):
        app(train)(message(), context())


def test_tables_of_words_are_refused_and_can_be_withheld() -> None:
    table = torch.rand(100, 4)
    changed = table.clone()
    changed[[3, 17, 50]] += 0.1
    before, after = START | {"embed": table}, TRAINED | {"embed": changed}
    ask = message(arrays=record_of(before))
    answer = plain(arrays=record_of(after))
    with pytest.raises(ValueError, match="'embed' is a table"):
        app(answer)(ask, context())
    found = sent(app(answer)(ask, context(withhold="emb*", **SCALED)))
    assert torch.equal(found["embed"], table)
    left = sent(app(answer)(ask, context(withhold="embed", withheld="left out", **SCALED)))
    assert left.keys() == START.keys()
    shared = sent(app(answer)(ask, context(**{"share-input-embeddings": True}, **SCALED)))
    assert bool((shared["embed"] != table).all())


def test_statistics_of_batches_are_not_sent() -> None:
    names = "norm.running_mean", "norm.num_batches_tracked"
    before = START | dict(zip(names, (torch.zeros(4), torch.tensor(0)), strict=True))
    after = TRAINED | dict(zip(names, (torch.ones(4), torch.tensor(9)), strict=True))
    found = sent(
        app(plain(arrays=record_of(after)))(message(arrays=record_of(before)), context(**SCALED))
    )
    assert not found["norm.running_mean"].any()
    assert found["norm.num_batches_tracked"] == 0


def test_other_answers_hold_numbers_only() -> None:
    numbers = {"metrics": MetricRecord({"loss": 0.5, "num-examples": 3})}
    for kind in ("evaluate", "query"):
        assert not app(numbers)(message(kind), context()).has_error()
        with pytest.raises(ValueError, match="are no update"):
            app(plain())(message(kind), context())


def test_what_may_pass_is_named() -> None:
    notes = plain(notes=ConfigRecord({"version": "1.2"}))
    reply = app(notes)(message(), context(allow="notes", **SCALED))
    assert reply.content.config_records["notes"]["version"] == "1.2"


# Defenses that need the data


def trained_inside(protects: bool) -> Callable[[Message, Context], dict[str, Any]]:
    model, batch = make_task("bert", dtype=torch.float32)

    def train(message: Message, context: Context) -> dict[str, Any]:
        received = message.content.array_records["arrays"]
        guard = ClientGuard(context)
        defense = guard.defense if protects else "none"
        update = protect_update(model, [batch] * 2, defense, learning_rate=0.05)
        if protects:
            return plain(arrays=guard.arrays(received, update))
        return plain(arrays=record_of(guard.sent(tensors_of(received), update)))

    return train


def weights() -> ArrayRecord:
    model, _ = make_task("bert", dtype=torch.float32)
    return record_of({name: p.detach() for name, p in model.named_parameters()})


def test_the_app_protects_where_the_data_is() -> None:
    here = context(defense="optimal_noise", settings__relative_scale=0.5)
    received = weights()
    reply = app(trained_inside(True))(message(arrays=received), here)
    before, found = tensors_of(received), sent(reply)
    name = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(found[name], before[name])  # withheld: as it was
    assert not torch.equal(found["classifier.weight"], before["classifier.weight"])
    assert STATE in here.state  # what it learned of public batches


def test_what_the_app_protects_has_all_names_of_a_tensor() -> None:
    table = torch.randn(4, 3)
    received, update = {"embed": table, "head": table, "other": table + 1}, torch.ones(4, 3)
    found = tensors_of(ClientGuard(context()).arrays(record_of(received), {"embed": update}))
    assert torch.equal(found["head"], found["embed"])
    assert torch.equal(found["embed"], table + 1)
    assert torch.equal(found["other"], received["other"])


def test_a_defense_that_needs_the_data_is_not_left_out() -> None:
    """If the app forgot to protect, the mod cannot, and nothing is sent."""
    here = context(defense="soteria", withhold="*position_embeddings*")
    with pytest.raises(RuntimeError, match="protect_update"):
        app(trained_inside(False))(message(arrays=weights()), here)


def test_a_ticket_is_for_one_answer() -> None:
    """What the app changes after it protected does not pass."""

    def tampered(message: Message, context: Context) -> dict[str, Any]:
        answer = trained_inside(True)(message, context)
        tensors = tensors_of(answer["arrays"])
        tensors["classifier.bias"] += 1
        return answer | {"arrays": record_of(tensors)}

    here = context(defense="soteria", withhold="*position_embeddings*")
    with pytest.raises(RuntimeError, match="protect_update"):
        app(tampered)(message(arrays=weights()), here)


# State over rounds


def rounds(here: Context, count: int, killed: int | None = None) -> list[Context]:
    """Contexts after each round, as a node keeps them. In the round `killed`, the process dies in
    the middle, and the round is done again by a new one from what the node had kept.
    """
    kept = [pickle.dumps(here)]
    train = trained_inside(True)
    for number in range(count):
        if number == killed:
            with pytest.raises(KeyboardInterrupt):
                app(dying(train))(message(arrays=weights()), pickle.loads(kept[-1]))
        here = pickle.loads(kept[-1])
        app(train)(message(arrays=weights()), here)
        kept.append(pickle.dumps(here))
    return [pickle.loads(one) for one in kept[1:]]


def dying(train: Callable[..., Any]) -> Callable[..., Any]:
    def killed(message: Message, context: Context) -> dict[str, Any]:
        train(message, context)
        raise KeyboardInterrupt

    return killed


def test_a_killed_client_rejoins_with_its_state() -> None:
    """Past averages are those of a client that was never killed: the data is the same every round,
    and so is what they learn from it, but for the probes' chance.
    """
    settings = {"defense": "optimal_noise", "settings__shape": "past", "settings__refresh-every": 1}
    whole = rounds(context(**settings), 3)
    again = rounds(context(**settings), 3, killed=2)
    for run in (whole, again):
        assert [int(tensors_of(here.state[STATE])["calls"]) for here in run] == [1, 2, 3]
    guard = ClientGuard(again[-1])
    found, kept = guard.defense.state_dict(), tensors_of(again[-1].state[STATE])
    assert found.keys() == kept.keys()
    assert all(torch.equal(found[name], kept[name]) for name in kept)
    powers = next(name for name in kept if name.startswith("powers"))  # of g², without probes
    torch.testing.assert_close(kept[powers], tensors_of(whole[-1].state[STATE])[powers])


def test_what_was_left_out_comes_later_also_after_a_kill() -> None:
    """Pruning with error feedback has no chance in it: a client that was killed in the middle of
    its third round sends what it would have, and what waits is in `context.state` alone.
    """

    def run(killed: int | None) -> list[dict[str, Tensor]]:
        settings = {"settings__ratio": 0.9, "settings__error_feedback": True}
        kept, found = pickle.dumps(context(defense="pruning", **settings)), []
        for number in range(4):
            answer = plain(arrays=record_of({n: START[n] + (1 + number) * STEP[n] for n in START}))
            if number == killed:
                with pytest.raises(KeyboardInterrupt):
                    app(dying(lambda *_, a=answer: a))(message(), pickle.loads(kept))
            here = pickle.loads(kept)
            found.append(sent(app(answer)(message(), here)))
            kept = pickle.dumps(here)
        return found

    whole, again = run(None), run(2)
    for one, other in zip(whole, again, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    alone = sent(app(plain(arrays=record_of({n: START[n] + 4 * STEP[n] for n in START})))(
        message(), context(defense="pruning", settings__ratio=0.9)
    ))  # fmt: skip
    assert distance(alone, whole[-1]) > 0.01


def test_a_folder_keeps_what_the_node_lost(tmp_path: Path) -> None:
    settings = {
        "defense": "optimal_noise",
        "settings__shape": "past",
        "state-folder": str(tmp_path / "state"),
    }
    here = rounds(context(**settings), 1)[0]
    fresh = ClientGuard(context(**settings))
    kept = tensors_of(here.state[STATE])
    assert kept.keys() == fresh.defense.state_dict().keys()
    (file,) = (tmp_path / "state").iterdir()
    assert file.stat().st_mode & 0o077 == 0
    other = settings | {"settings__shape": "public"}
    assert not ClientGuard(context(**other)).defense.state_dict()


def correlated_context(folder: Path) -> Context:
    noise = {"correlated": True, "scale": 0.5, "messages": 5}
    settings = {f"settings__{name}": value for name, value in noise.items()}
    return context(defense="dp_sgd", **{"state-folder": str(folder)}, **settings)


def sends(here: Context) -> None:
    answer = plain(arrays=record_of({n: START[n] + STEP[n] for n in START}))
    app(answer)(message(), here)


def test_a_restored_context_goes_on_where_the_folder_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages that have left are followed by noise that cancels theirs, and none comes twice."""
    here = correlated_context(tmp_path / "state")
    sends(here)
    kept = pickle.dumps(here)
    sends(here)
    sends(here)
    restored = pickle.loads(kept)
    assert ClientGuard(restored).position == 3
    assert "holds 2 message(s) of this node that its context does not know" in caplog.text
    sends(restored)
    assert int(tensors_of(restored.state[STATE])["noise_stream/plan"][1]) == 4


def test_an_older_folder_is_left_behind(tmp_path: Path) -> None:
    here = correlated_context(tmp_path / "state")
    sends(here)
    (file,) = (tmp_path / "state").iterdir()
    older = file.read_bytes()
    sends(here)
    file.write_bytes(older)
    assert ClientGuard(here).position == 2


def test_two_courses_of_correlated_noise_are_refused(tmp_path: Path) -> None:
    here = correlated_context(tmp_path / "state")
    sends(here)
    kept = pickle.dumps(here)
    (file,) = (tmp_path / "state").iterdir()
    first = file.read_bytes()
    sends(here)
    restored = pickle.loads(kept)
    file.write_bytes(first)
    sends(restored)  # another second message
    with pytest.raises(ValueError, match="both hold 2 messages"):
        ClientGuard(here)


def test_another_defense_starts_anew(caplog: pytest.LogCaptureFixture) -> None:
    here = rounds(context(defense="optimal_noise"), 1)[0]
    here.run_config["gradguard.defense"] = "optimal_pruning"
    assert not ClientGuard(here).defense.state_dict()
    assert "another one now" in caplog.text


# The server


class Merging(MergeByName, FedAvg):
    """As a server has it whose clients leave names out."""


def test_names_that_are_left_out_stay_as_they_were() -> None:
    whole = START | {"embed": torch.rand(100, 4)}
    strategy = Merging()
    strategy._all_arrays = record_of(whole)
    ask = message(arrays=record_of(whole))
    answer = plain(arrays=record_of(TRAINED | {"embed": whole["embed"]}))
    here = {"withhold": "embed", "withheld": "left out", "settings__scale": 1e-8}
    replies = [app(answer)(ask, context(**here)) for _ in range(2)]
    for node, reply in enumerate(replies):
        reply.metadata.__dict__["_src_node_id"] = node + 1
    arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays is not None
    found = tensors_of(arrays)
    assert list(found) == list(whole)
    assert torch.equal(found["embed"], whole["embed"])
    torch.testing.assert_close(found["layer.bias"], TRAINED["layer.bias"], rtol=0, atol=1e-5)


# Older clients, and secure aggregation


def test_secure_aggregation_sees_protected_updates() -> None:
    """Composed with Flower's SecAgg+ mod, through all its stages with three clients: the mean that
    the server unmasks is that of protected updates.
    """
    config = {"gradguard.defense": "pruning", "gradguard.pruning.ratio": 0.8}
    plain_mean, found, protected = run_secagg(gradguard_mod, config)
    assert np.abs(found - protected).max() < 1e-4  # what SecAgg+ rounds
    assert np.abs(plain_mean - protected).max() > 1e-3


def test_with_secure_aggregation_it_is_on_by_default_too() -> None:
    config = {"gradguard.gaussian_noise.scale": 0.05}
    plain_mean, found, protected = run_secagg(gradguard_mod, config)
    assert np.abs(found - protected).max() < 1e-4
    assert np.abs(plain_mean - protected).max() > 1e-2


# Packed


def over_the_wire(reply: Message) -> tuple[Message, int]:
    """A reply as the server gets it, by Flower's own serialization, and its bytes."""
    contents = {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
    arrived = inflate_object_from_contents(reply.object_id, dict(contents))
    assert isinstance(arrived, Message)
    return arrived, sum(map(len, contents.values()))


def trained_on(**config: Any) -> tuple[dict[str, Tensor], int]:
    """The weights after a round of two nodes, and the bytes of one reply."""
    big = {"layer.weight": torch.linspace(-1, 1, 60_000).view(200, 300)}
    change = {"layer.weight": 0.01 * torch.cos(torch.arange(60_000).float()).view(200, 300)}
    strategy, ask, replies = Merging(), message(arrays=record_of(big)), []
    strategy._all_arrays = record_of(big)
    for node in (1, 2):
        answer = plain(arrays=record_of({n: t + node * change[n] for n, t in big.items()}))
        reply, size = over_the_wire(app(answer)(ask, context(**config)))
        reply.metadata.__dict__["_src_node_id"] = node
        replies.append(reply)
    arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays is not None
    return tensors_of(arrays), size


@pytest.mark.parametrize(
    ("config", "share"),
    [
        ({"defense": "pruning", "settings__ratio": 0.99}, 0.03),
        ({"defense": "quantization", "settings__bits": 4}, 0.125 + 0.01),
        ({"defense": "quantization"}, 1 / 32 + 0.01),
    ],
)
def test_packed_updates_train_the_same_weights(config: dict[str, Any], share: float) -> None:
    (whole, bytes_whole), (packed, bytes_packed) = (
        trained_on(**config, packed=is_on) for is_on in (False, True)
    )
    assert list(packed) == list(whole)
    assert all(torch.equal(packed[name], whole[name]) for name in whole)
    assert bytes_whole > 240_000
    assert bytes_packed < share * bytes_whole


def test_packed_updates_of_the_app_itself() -> None:
    """By `ClientGuard.arrays`, whose bytes the mod lets pass."""
    config = {"defense": "pruning", "settings__ratio": 0.75, "packed": True}

    def answer(message: Message, context: Context) -> dict[str, Any]:
        guard = ClientGuard(context)
        update = guard.defense(PrecomputedGradient(STEP))
        return plain(arrays=guard.arrays(message.content.array_records["arrays"], update))

    reply = app(answer)(message(), context(**config))
    assert all(is_packed(tensor) for tensor in sent(reply).values())
    unpack_reply(reply, START)
    whole = sent(app(plain())(message(), context(**(config | {"packed": False}))))
    for name, tensor in sent(reply).items():  # the mod's own difference has a rounding more
        torch.testing.assert_close(tensor, whole[name], rtol=0, atol=2e-7)


def test_malformed_replies_are_refused_by_name_and_node() -> None:
    reply = app(plain())(message(), context(defense="pruning", settings__ratio=0.9, packed=True))
    tensors = sent(reply)
    reply.content["arrays"] = record_of(tensors | {"layer.bias": tensors["layer.bias"][:-1]})
    reply.metadata.__dict__["_src_node_id"] = 77
    strategy = Merging()
    strategy._all_arrays = record_of(START)
    with pytest.raises(ValueError, match=r"'layer\.bias' is packed wrongly") as refused:
        strategy.aggregate_train(1, [reply])
    assert refused.value.__notes__ == ["Node 77 sent it."]


def test_secure_aggregation_refuses_packed_updates() -> None:
    config = {"gradguard.defense": "pruning", "gradguard.pruning.ratio": 0.8}
    with pytest.raises(ValueError, match=r"gradguard\.packed"):
        run_secagg(gradguard_mod, config | {"gradguard.packed": True})
