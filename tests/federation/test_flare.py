"""FLARE's filter: on by default, off only when told, set by the job, closed when in doubt."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("nvflare")

from flare_trainer import STEP as BIG_STEP
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply

from hf_gradguard.federation.flare import GradGuardFilter, GradGuardUnpackFilter
from hf_gradguard.federation.packing import pack

START = {
    "layer.weight": np.linspace(-1, 1, 600, dtype=np.float32).reshape(20, 30),
    "layer.bias": np.ones(20, np.float32),
}
STEP = {
    name: (0.01 * np.cos(np.arange(w.size))).astype(np.float32).reshape(w.shape)
    for name, w in START.items()
}

SCALED: dict[str, Any] = {"settings": {"scale": 0.01}}


def context(direction: str = FilterKey.OUT, folder: Path | None = None) -> FLContext:
    found = FLContext()
    found.set_prop(FLContextKey.FILTER_DIRECTION, direction, private=True, sticky=False)
    if folder is not None:
        workspace = SimpleNamespace(get_run_dir=lambda job: str(folder / str(job)))
        engine = SimpleNamespace(get_workspace=lambda: workspace)
        found.set_prop("__engine__", engine, private=True, sticky=True)
        found.get_engine = lambda *_, **__: engine  # type: ignore[method-assign]
        found.get_job_id = lambda *_, **__: "job"  # type: ignore[method-assign]
    return found


def diff(data: dict[str, Any] | None = None, **meta: Any) -> Shareable:
    return DXO(DataKind.WEIGHT_DIFF, dict(data or STEP), meta).to_shareable()


def told(guard: GradGuardFilter, start: dict[str, Any] | None = None) -> GradGuardFilter:
    """A filter that has seen the weights which came with a task."""
    ctx = FLContext()
    ctx.set_prop(
        FLContextKey.TASK_DATA, DXO(DataKind.WEIGHTS, dict(start or START)).to_shareable(),
        private=True, sticky=False,
    )  # fmt: skip
    guard.handle_event(EventType.BEFORE_TASK_EXECUTION, ctx)
    return guard


def sent(guard: GradGuardFilter, result: Shareable, ctx: FLContext | None = None) -> dict[str, Any]:
    return from_shareable(guard.process(result, ctx or context())).data


def flat(arrays: dict[str, Any]) -> np.ndarray:
    return np.concatenate([np.asarray(arrays[name]).ravel() for name in START])


def test_without_arguments_nothing_is_sent() -> None:
    """It is on, and noise relative to an update would show the update's norm."""
    with pytest.raises(ValueError, match=r"gradguard\.gaussian_noise\.scale"):
        told(GradGuardFilter()).process(diff(), context())


def test_with_its_scale_alone_noise_is_on() -> None:
    numbers = {MetaKey.NUM_STEPS_CURRENT_ROUND: 4, MetaKey.INITIAL_METRICS: {"loss": 0.5}}
    reply = told(GradGuardFilter(**SCALED)).process(diff(**numbers), context())
    dxo = from_shareable(reply)
    found, true = flat(dxo.data), flat(STEP)
    size = 0.01 * 620**0.5
    # Of 620 draws the norm is within a tenth but for one in 10⁻³.
    assert 0.85 * size < np.linalg.norm(found - true) < 1.15 * size
    assert dxo.get_filter_history() == ["GradGuardFilter"]
    assert dxo.meta[MetaKey.INITIAL_METRICS] == {"loss": 0.5}
    again = flat(sent(told(GradGuardFilter(**SCALED)), diff()))
    assert np.linalg.norm(found - again) > size  # no seed that somebody knows


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_values_are_those_of_the_defense(kind: Any) -> None:
    guard = told(GradGuardFilter("pruning", {"ratio": 0.75}))
    found = sent(guard, diff({name: kind(step) for name, step in STEP.items()}))
    assert all(type(found[name]) is type(kind(STEP[name])) for name in STEP)
    true = flat(STEP)
    kept = np.abs(true) >= np.sort(np.abs(true))[465]
    assert (flat(found) == np.where(kept, true, 0)).all()


def test_opting_out_is_explicit(caplog: pytest.LogCaptureFixture) -> None:
    assert (flat(sent(told(GradGuardFilter("none")), diff())) == flat(STEP)).all()
    assert "sent as it is" in caplog.text
    for wrong in ("None", "off", "", "gaussian"):
        with pytest.raises(ValueError, match="gaussian_noise"):
            GradGuardFilter(wrong)


def test_a_wrong_argument_stops_before_the_job() -> None:
    with pytest.raises(TypeError, match="sigma"):
        GradGuardFilter(settings={"sigma": 1.0})
    with pytest.raises(ValueError, match="below 1"):
        GradGuardFilter("pruning", {"ratio": 2.0})
    with pytest.raises(TypeError, match="defence"):
        GradGuardFilter(defence="pruning")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="'zeros' or 'left out'"):
        GradGuardFilter(withheld="no")  # type: ignore[arg-type]


def with_header(name: str, value: Any) -> Shareable:
    result = diff()
    result.set_header(name, value)
    return result


WRONG: dict[str, tuple[Any, str]] = {
    "no DXO": (lambda: Shareable({"weights": STEP}), "not a valid DXO"),
    "weights": (lambda: DXO(DataKind.WEIGHTS, dict(STEP)).to_shareable(), "no difference"),
    "a collection": (
        lambda: DXO(
            DataKind.COLLECTION, {"a": DXO(DataKind.WEIGHT_DIFF, dict(STEP))}
        ).to_shareable(),
        "no difference",
    ),
    "statistics": (lambda: DXO(DataKind.STATISTICS, {"mean": 1}).to_shareable(), "no difference"),
    "weights by another name": (
        lambda: diff({n: START[n] + STEP[n] for n in START}), "where the weights themselves",
    ),
    "encrypted": (lambda: diff(PROCESSED_ALGORITHM="HE"), "processed by 'HE'"),
    "a name too many": (lambda: diff(STEP | {"x": np.ones(2, np.float32)}), "'x' was not"),
    "a name missing": (lambda: diff({"layer.bias": STEP["layer.bias"]}), "is missing"),
    "another shape": (lambda: diff(STEP | {"layer.bias": np.ones(21, np.float32)}), "has shape"),
    "another type": (lambda: diff(STEP | {"layer.bias": np.ones(20)}), "has type"),
    "no array": (lambda: diff(STEP | {"layer.bias": [1.0] * 20}), "a list, and no array"),
    "text": (lambda: diff(note="patient 7"), "'note', a str"),
    "an array beside": (lambda: diff(hidden=np.ones(3)), "'hidden', a ndarray"),
    "metrics by class": (lambda: diff(initial_metrics={"all": [0.1]}), "'initial_metrics.all'"),
    "a header": (lambda: with_header("raw", b"pixels"), "'raw', a bytes"),
    "an array as a known header": (lambda: with_header("__topic__", [1.5]), "'__topic__', a list"),
    "another record": (lambda: diff() | {"more": [1]}, "'more', a list"),
    "metrics that are texts": (
        lambda: DXO(DataKind.METRICS, {"best": "a text"}).to_shareable(), "'best', a str",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_difference_of_weights_is_refused(case: str) -> None:
    make, words = WRONG[case]
    made = make()
    result = made if isinstance(made, Shareable) else _shareable(made)
    with pytest.raises(ValueError, match=words):
        told(GradGuardFilter()).process(result, context())


def _shareable(items: dict[str, Any]) -> Shareable:
    found = Shareable()
    found.update(items)
    return found


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    broken = diff(STEP | {"layer.bias": np.full(20, value, np.float32)})
    with pytest.raises(FloatingPointError, match=r"layer\.bias"):
        told(GradGuardFilter()).process(broken, context())


def test_without_weights_that_came_nothing_goes() -> None:
    guard = told(GradGuardFilter(**SCALED))
    guard.process(diff(), context())
    with pytest.raises(ValueError, match="no weights came"):
        guard.process(diff(), context())  # those of the last task do not count
    metrics = DXO(DataKind.METRICS, {"accuracy": 0.5, "count": np.float32(3)}).to_shareable()
    assert from_shareable(GradGuardFilter().process(metrics, context())).data["accuracy"] == 0.5


def test_of_a_failure_only_its_code_goes() -> None:
    failed = diff()
    failed.set_return_code(ReturnCode.EXECUTION_EXCEPTION)
    reply = GradGuardFilter().process(failed, context())
    assert reply == make_reply(ReturnCode.EXECUTION_EXCEPTION)


def after(guard: GradGuardFilter, result: Shareable, seen: bool = False) -> Shareable:
    """What is left of a result when the filters are through."""
    ctx = context()
    if seen:
        result = told(guard).process(result, ctx)
    ctx.set_prop(FLContextKey.TASK_RESULT, result, private=True, sticky=False)
    guard.handle_event(EventType.AFTER_TASK_RESULT_FILTER, ctx)
    return result


def test_what_goes_past_the_filter_is_emptied() -> None:
    """FLARE has no `"*"`, and a filter that is named for a task does not see the others."""
    blocked = make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR)
    best = DXO(DataKind.WEIGHTS, dict(START)).to_shareable()
    assert after(GradGuardFilter(), diff()) == blocked
    assert after(GradGuardFilter(), best) == blocked
    assert after(GradGuardFilter(), Shareable({"model": STEP})) == blocked
    metrics = DXO(DataKind.METRICS, {"accuracy": 0.5}).to_shareable()
    assert from_shareable(after(GradGuardFilter(), metrics)).data == {"accuracy": 0.5}
    failed = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    assert after(GradGuardFilter(), failed) == make_reply(ReturnCode.EXECUTION_EXCEPTION)
    assert (
        from_shareable(after(GradGuardFilter(**SCALED), diff(), seen=True)).data.keys()
        == STEP.keys()
    )
    assert from_shareable(after(GradGuardFilter("none"), diff())).data.keys() == STEP.keys()


def test_it_is_for_clients() -> None:
    guard = told(GradGuardFilter())
    with pytest.raises(RuntimeError, match="clients'"):
        guard.process(diff(), context(FilterKey.IN))


def test_named_for_tasks_data_too_it_needs_no_events() -> None:
    """As in a site's privacy policy, whose filters FLARE tells of no events."""
    ctx = context(FilterKey.IN)
    data = GradGuardFilter()
    data.set_prop(FilterContextKey.CHAIN_TYPE, FilterChainType.TASK_DATA_CHAIN)
    task = DXO(DataKind.WEIGHTS, dict(START)).to_shareable()
    assert data.process(task, ctx) is task
    ctx.set_prop(FLContextKey.FILTER_DIRECTION, FilterKey.OUT, private=True, sticky=False)
    found = flat(sent(GradGuardFilter(**SCALED), diff(), ctx))
    assert not (found == flat(STEP)).any()


def test_a_defense_that_needs_the_data_sends_nothing() -> None:
    with pytest.raises(RuntimeError, match="protect_update"):
        told(GradGuardFilter("soteria")).process(diff(), context())


def test_tables_and_statistics_are_withheld_or_refused() -> None:
    table, changed = np.ones((100, 4), np.float32), np.zeros((100, 4), np.float32)
    changed[[3, 17, 50]] = 0.1
    start, step = START | {"embed": table}, STEP | {"embed": changed}
    with pytest.raises(ValueError, match="'embed' is a table"):
        told(GradGuardFilter(), start).process(diff(step), context())
    found = sent(told(GradGuardFilter(withhold="emb*", **SCALED), start), diff(step))
    assert not found["embed"].any()
    left = GradGuardFilter(withhold="embed", withheld="left out", **SCALED)
    assert sent(told(left, start), diff(step)).keys() == START.keys()
    start, step = START | {"n.running_mean": table[0]}, STEP | {"n.running_mean": changed[3]}
    assert not sent(told(GradGuardFilter(**SCALED), start), diff(step))["n.running_mean"].any()


def test_what_may_pass_is_named() -> None:
    guard = told(GradGuardFilter(allow="note, raw", **SCALED))
    assert from_shareable(guard.process(diff(note="1.2"), context())).meta["note"] == "1.2"


def test_a_killed_client_rejoins_with_its_state(tmp_path: Path) -> None:
    """Pruning with error feedback: what was left out comes later, also from a process of its own,
    and the file is the client's alone.
    """

    def run(killed: bool, folder: Path) -> list[np.ndarray]:
        made = lambda: GradGuardFilter("pruning", {"ratio": 0.9, "error_feedback": True})  # noqa: E731
        guard, found = made(), []
        for number in range(4):
            guard = made() if killed and number == 2 else guard
            step = {name: (1 + number) * value for name, value in STEP.items()}
            found.append(flat(sent(told(guard), diff(step), context(folder=folder))))
        return found

    whole, again = run(False, tmp_path / "a"), run(True, tmp_path / "b")
    assert all((one == other).all() for one, other in zip(whole, again, strict=True))
    alone = flat(
        sent(told(GradGuardFilter("pruning", {"ratio": 0.9})), diff({n: 4 * STEP[n] for n in STEP}))
    )
    assert np.linalg.norm(alone - whole[-1]) > 0.01
    (file,) = (tmp_path / "b" / "job" / "gradguard").iterdir()
    assert file.stat().st_mode & 0o077 == 0
    file.write_bytes(b"damaged")
    with pytest.raises(ValueError, match="damaged"):
        run(False, tmp_path / "b")


def test_the_job_api_writes_its_arguments() -> None:
    from nvflare.job_config.fed_job_config import FedJobConfig

    guard = GradGuardFilter("pruning", {"ratio": 0.9}, allow="note")
    config = FedJobConfig(job_name="job", min_clients=1)
    found = config._get_args(guard, None)
    assert found == {"defense": "pruning", "settings": {"ratio": 0.9}, "allow": "note"}
    assert GradGuardFilter(**found)._guard.settings == guard._guard.settings


# Packed


def unpacking(weights: dict[str, Any] | None = None) -> GradGuardUnpackFilter:
    """A server's filter, after a task went out with these weights."""
    ctx, unpack = FLContext(), GradGuardUnpackFilter()
    task = DXO(DataKind.WEIGHTS, dict(weights or START)).to_shareable()
    ctx.set_prop(FLContextKey.TASK_DATA, task, private=True, sticky=False)
    unpack.handle_event(EventType.AFTER_TASK_DATA_FILTER, ctx)
    return unpack


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_packed_differences_arrive_to_the_last_bit(kind: Any) -> None:
    arguments = {"defense": "pruning", "settings": {"ratio": 0.9}}
    data = {name: kind(step) for name, step in STEP.items()}
    whole = sent(told(GradGuardFilter(**arguments)), diff(data))
    reply = told(GradGuardFilter(**arguments, packed=True)).process(diff(data), context())
    packed = from_shareable(reply).data
    assert sum(len(array) for array in packed.values()) < 0.13 * 4 * 620 + 56
    arrived = from_shareable(unpacking().process(reply, context(FilterKey.IN)))
    for name, array in whole.items():
        assert type(arrived.data[name]) is type(array)
        assert (np.asarray(arrived.data[name]) == np.asarray(array)).all()
    assert arrived.get_filter_history() == ["GradGuardFilter", "GradGuardUnpackFilter"]
    unpacked = unpacking().process(diff(STEP), context(FilterKey.IN))
    assert (flat(from_shareable(unpacked).data) == flat(STEP)).all()  # as it is


def test_malformed_differences_are_refused_by_name() -> None:
    good = pack(torch.from_numpy(STEP["layer.bias"]))
    adds = pack(torch.from_numpy(STEP["layer.bias"]), is_added=True)
    for bad, words in ((good[:-1], "bytes"), (adds, "no difference")):
        result = diff(STEP | {"layer.bias": bad.numpy()})
        with pytest.raises(ValueError, match=f"'layer.bias' is packed wrongly: .*{words}"):
            unpacking().process(result, context(FilterKey.IN))
    with pytest.raises(ValueError, match="'other' was sent"):
        unpacking().process(diff(STEP | {"other": good.numpy()}), context(FilterKey.IN))


# FLARE's simulator


def simulated(folder: Path, sends: str, task: str = "train", **guard: Any) -> list[dict[str, Any]]:
    """Two rounds of two clients."""
    app, code = folder / "job" / "app" / "config", folder / "job" / "app" / "custom"
    app.mkdir(parents=True), code.mkdir()
    shutil.copy(Path(__file__).with_name("flare_trainer.py"), code)
    (folder / "job" / "meta.json").write_text(json.dumps({
        "name": "job", "resource_spec": {}, "min_clients": 2, "deploy_map": {"app": ["@ALL"]},
    }))  # fmt: skip
    output = folder / "found.json"
    controller = {"id": "rounds", "path": "flare_trainer.Rounds", "args": {"output": str(output)}}
    unpack = {"path": "hf_gradguard.federation.flare.GradGuardUnpackFilter", "args": {}}
    server = {
        "format_version": 2, "workflows": [controller], "components": [], "task_data_filters": [],
        "task_result_filters": [{"tasks": ["train"], "filters": [unpack]}],
    }  # fmt: skip
    (app / "config_fed_server.json").write_text(json.dumps(server))
    filters = [{"path": "hf_gradguard.federation.flare.GradGuardFilter", "args": guard}]
    trainer = {"path": "flare_trainer.Trainer", "args": {"sends": sends}}
    client = {
        "format_version": 2,
        "executors": [{"tasks": ["train"], "executor": trainer}],
        "task_result_filters": [{"tasks": [task], "filters": filters}],
        "task_data_filters": [],
        "components": [],
    }
    (app / "config_fed_client.json").write_text(json.dumps(client))
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "nvflare.private.fed.app.simulator.simulator", str(folder / "job"),
         "-w", str(folder / "work"), "-n", "2", "-t", "2"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, check=False, timeout=280, cwd=folder,
    )  # fmt: skip
    assert output.exists(), (done.stdout + done.stderr)[-3000:]
    found: list[dict[str, Any]] = json.loads(output.read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_in_the_simulator_updates_arrive_protected(tmp_path: Path, packed: bool) -> None:
    settings = {"ratio": 0.9, "error_feedback": True, "min_batches": 1}
    arguments = {"defense": "pruning", "settings": settings, "packed": packed}
    found = simulated(tmp_path, "WEIGHT_DIFF", **arguments)
    assert [row["code"] for row in found] == ["OK"] * 4
    for site in (1, 2):
        kept, rows = 0, [row for row in found if row["site"] == f"site-{site}"]
        assert len(rows) == 2
        for row in rows:  # what the first round left out comes on top in the second
            whole = BIG_STEP * np.float32(site) + kept
            largest = np.abs(whole) >= np.sort(np.abs(whole), axis=None)[3600]
            np.testing.assert_allclose(row["layer"], np.where(largest, whole, 0), atol=1e-8)
            kept = np.where(largest, 0, whole)
    for row in found:
        assert row["meta"]["filter_history"] == ["GradGuardFilter", "GradGuardUnpackFilter"]
        assert row["meta"]["initial_metrics"] == {"accuracy": 0.5}
    files = list((tmp_path / "work").rglob("gradguard/site-*.safetensors"))
    assert len(files) == 2
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)


@pytest.mark.slow
@pytest.mark.parametrize(("sends", "task"), [("WEIGHTS", "train"), ("WEIGHT_DIFF", "*")])
def test_in_the_simulator_nothing_else_arrives(tmp_path: Path, sends: str, task: str) -> None:
    found = simulated(tmp_path, sends, task)
    assert found
    for row in found:
        assert row["code"] == ReturnCode.TASK_RESULT_FILTER_ERROR
        assert "layer" not in row
