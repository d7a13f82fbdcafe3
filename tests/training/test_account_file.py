"""What left a rank counts, whatever becomes of the run: it is on the disk before it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from account_worker import ROWS, SIGMA, Telling, trainer

from hf_gradguard.defenses.correlated import make_factor
from hf_gradguard.leakage import FisherAccountant, PrivacyAccount, gaussian_epsilon
from hf_gradguard.training.privacy.private_rows import AccountFile

HERE = Path(__file__).parent
FILE = "gradguard_account_rank0.jsonl"


def killed(folder: Path, kind: str, after: int) -> list[dict[str, Any]]:
    """The messages of a run that left before it was killed (SIGKILL), as far as it tells."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(HERE.parent)])}
    process = subprocess.Popen(
        [sys.executable, str(HERE / "account_worker.py"), str(folder), kind],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    left = []
    for line in process.stdout:  # also what left until the kill arrived
        if line.startswith("left"):
            left.append(json.loads(line.partition(" ")[2]))
        if len(left) == after:
            process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    return left


@pytest.mark.long
def test_epsilon_counts_what_left_before_a_kill(tmp_path: Path) -> None:
    count = len(killed(tmp_path, "epsilon", 6))
    step = max(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*"))
    resumed = trainer(tmp_path, "epsilon", max_steps=step + 3)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == step + 3
    (messages,) = resumed.private_rows.account.messages.values()
    assert 0 <= messages - (count + 3) <= 1  # one may be written down and not have left
    everything = PrivacyAccount({(1.0, 0.25): count + 3})
    assert resumed.private_rows.account.epsilon(1e-3) >= everything.epsilon(1e-3)


@pytest.mark.long
def test_correlated_noise_goes_on_after_a_kill(tmp_path: Path) -> None:
    """Two kills, the second of a run that went on: each message leaves once, with the noise and the
    rows that a run left alone gives it, and ε is no less than that of what left.
    """
    alone = trainer(tmp_path / "alone", "correlated", Telling)
    alone.train()
    expected = {message["place"]: message for message in alone.left}
    assert list(expected) == list(range(12))
    left = killed(tmp_path / "run", "correlated", 5)
    left += killed(tmp_path / "run", "correlated", 3)
    resumed = trainer(tmp_path / "run", "correlated", Telling)
    resumed.train(resume_from_checkpoint=True)
    left += resumed.left
    places = [message["place"] for message in left]
    assert places == sorted(set(places))  # none twice
    assert len(places) >= 10  # each kill may cost one that was written down and did not leave
    assert places[-1] == 11
    for message in left:
        same = expected[message["place"]]
        assert sorted(message["rows"]) == sorted(same["rows"])
        assert message["sums"] == pytest.approx(same["sums"], rel=1e-9)
    # each row's trace behind the dense factor, in units of the noise there
    column = make_factor("blt", 12).column(12)
    factor = torch.stack([torch.cat([column.new_zeros(t), column[: 12 - t]]) for t in range(12)])
    traces = torch.zeros(ROWS, 12, dtype=torch.float64)
    for message in left:
        traces[message["rows"]] += factor[message["place"]]
    largest = float(traces.norm(dim=1).max() / (SIGMA * column.norm()))
    assert resumed.private_rows.account.epsilon(1e-3) >= gaussian_epsilon(1 / largest, 1e-3)
    assert resumed.private_rows.account.epsilon(1e-3) == pytest.approx(
        alone.private_rows.account.epsilon(1e-3)
    )


@pytest.mark.parametrize("kind", ["epsilon", "fisher"])
def test_a_run_that_was_killed_before_its_first_checkpoint_counts(
    tmp_path: Path, kind: str
) -> None:
    trainer(tmp_path, kind, max_steps=2, save_strategy="no").train()
    t = trainer(tmp_path, kind, max_steps=3, save_strategy="no")
    t.train(resume_from_checkpoint=True)  # begins anew
    account = t.private_rows.account if t.private_rows else t.accountant
    messages = account.steps if kind == "fisher" else sum(account.messages.values())
    assert messages == 2 + 3


@pytest.mark.slow
def test_the_fisher_account_counts_what_left_before_a_kill(tmp_path: Path) -> None:
    count = len(killed(tmp_path, "fisher", 6))
    resumed = trainer(tmp_path, "fisher", max_steps=1)  # no step more
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert 0 <= resumed.accountant.steps - count <= 1
    lines = (tmp_path / FILE).read_text().splitlines()
    records = [json.loads(line.split("\t")[0]) for line in lines]
    alone = FisherAccountant()
    for record in records:
        alone.add_release(record["release"])
    assert {key: alone.dfil(key) for key in alone} == {
        key: resumed.accountant.dfil(key) for key in resumed.accountant
    }
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.long
@pytest.mark.parametrize("kind", ["epsilon", "fisher"])
def test_a_run_that_is_resumed_in_its_process_counts_nothing_twice(
    tmp_path: Path, kind: str
) -> None:
    t = trainer(tmp_path, kind, max_steps=6)
    t.train()
    t.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    account = t.private_rows.account if t.private_rows else t.accountant
    messages = account.steps if kind == "fisher" else sum(account.messages.values())
    assert messages == 8


@pytest.mark.long
def test_a_run_that_goes_on_elsewhere_counts_both_folders(tmp_path: Path) -> None:
    trainer(tmp_path / "one", "epsilon", max_steps=6).train()
    checkpoint = str(tmp_path / "one" / "checkpoint-4")
    other = trainer(tmp_path / "other", "epsilon", max_steps=8)
    other.train(resume_from_checkpoint=checkpoint)
    assert sum(other.private_rows.account.messages.values()) == 6 + 4
    again = trainer(tmp_path / "other", "epsilon", max_steps=9)
    again.train(resume_from_checkpoint=str(tmp_path / "other" / "checkpoint-8"))
    assert sum(again.private_rows.account.messages.values()) == 6 + 4 + 1


@pytest.mark.long
def test_a_new_run_in_the_folder_counts_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert "earlier run" not in caplog.text
        t = trainer(tmp_path, "epsilon", max_steps=5)
        t.train()
        assert sum(t.private_rows.account.messages.values()) == 5
    assert "holds 5 message(s) of 1 earlier run(s)" in caplog.text


def emptied(file: Path) -> None:
    file.write_text("")


def swapped(file: Path) -> None:
    other = AccountFile(file.parent / "other", 0)
    for _ in range(9):
        other.write({"noise_multiplier": 9.0, "sampling_rate": 0.1, "messages": 1})
    os.replace(file.parent / "other" / FILE, file)


def cut(file: Path) -> None:
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:2]))


def edited(file: Path) -> None:
    file.write_text(file.read_text().replace('"noise_multiplier": 1.0', '"noise_multiplier": 9.0'))


@pytest.mark.parametrize("damage", [Path.unlink, emptied, swapped, cut, edited])
def test_an_account_that_was_changed_is_refused(tmp_path: Path, damage: Any) -> None:
    trainer(tmp_path, "epsilon", max_steps=4).train()
    damage(tmp_path / FILE)
    resumed = trainer(tmp_path, "epsilon", max_steps=8)
    with pytest.raises(ValueError, match=rf"{FILE}.*Copy .*begin a new run"):
        resumed.train(resume_from_checkpoint=True)


def test_a_line_that_a_kill_cut_off_never_left(tmp_path: Path) -> None:
    account = AccountFile(tmp_path, 0)
    account.write({"messages": 1})
    with open(tmp_path / FILE, "a") as file:
        file.write('{"run": "')
    account.write({"messages": 2})
    again = AccountFile(tmp_path, 0)
    again.go_on_with(account.run)
    assert [record["messages"] for record in again.records([tmp_path], {})] == [1, 2]


def test_two_trainers_may_write_to_one_folder(tmp_path: Path) -> None:
    one, two = AccountFile(tmp_path, 0), AccountFile(tmp_path, 0)
    for account in (one, two, one):
        account.write({"messages": 1})
    assert len(one.records([tmp_path], one.counted)) == 0
    assert one.counted != two.counted
    with pytest.raises(ValueError, match="a run of its own"):
        one.go_on_with(two.run)


def test_nothing_is_written_without_an_account(tmp_path: Path) -> None:
    t = trainer(tmp_path, "fisher", max_steps=1)
    plain = type(t)(model=t.model, args=t.args, defense="none", train_dataset=t.train_dataset)
    plain.train()
    assert not (tmp_path / FILE).exists()
    assert torch.is_tensor(t.model.classifier.weight)


@pytest.mark.skipif(os.name == "nt", reason="Windows tells no time of change")
@pytest.mark.parametrize("skew", [0.3, -0.3, 500.0])
def test_a_file_server_whose_clock_is_another(
    skew: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on where it was is not taken for a copy."""
    account = AccountFile(tmp_path, rank=0)
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() - skew)
    for _ in range(2):
        account.write({"messages": 1})
    assert account.is_untouched()


@pytest.mark.skipif(os.name == "nt", reason="Windows tells no time of change")
def test_a_file_that_is_written_again_where_it_was_is_not_untouched(tmp_path: Path) -> None:
    """With the same content, in the same place, half a second later: only its time of change says
    that somebody put a backup back. Clocks of files tick every few milliseconds.
    """
    account = AccountFile(tmp_path, rank=0)
    account.write({"messages": 1})
    assert account.is_untouched()
    time.sleep(0.5)
    file = tmp_path / FILE
    content, place = file.read_bytes(), file.stat().st_ino
    with file.open("r+b") as opened:
        opened.write(content)
    assert (file.read_bytes(), file.stat().st_ino) == (content, place)
    assert not account.is_untouched()
