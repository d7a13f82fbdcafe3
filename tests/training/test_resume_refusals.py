"""What a resumed run refuses, with the reason and the way out: as the same process would."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from account_worker import trainer
from safetensors.torch import load_file, save_file

from hf_gradguard import GradGuardConfig, GradGuardTrainer, make_defense
from hf_gradguard.leakage import FisherAccountant

PRIVATE = "gradguard_private_rank0.safetensors"
LABELS = {"protect_labels": "randomized_response", "label_epsilon": 3.0}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished runs: two alike of each kind of account, and one with randomized labels."""
    folder = tmp_path_factory.mktemp("runs")
    for kind in ("epsilon", "fisher"):
        for name in ("one", "other"):
            trainer(folder / f"{kind}-{name}", kind, max_steps=2, save_steps=2).train()
    trainer(folder / "labels", "epsilon", max_steps=2, save_steps=2, **LABELS).train()
    return folder


def resume(folder: Path, kind: str, **settings: Any) -> Any:
    t = trainer(folder, kind, max_steps=3, **settings)
    t.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return t


@pytest.mark.long
@pytest.mark.parametrize("kind", ["epsilon", "fisher"])
def test_what_was_saved_is_resumed(runs: Path, tmp_path: Path, kind: str) -> None:
    folder = Path(shutil.copytree(runs / f"{kind}-one", tmp_path / "run"))
    assert resume(folder, kind).state.global_step == 3


@pytest.mark.parametrize("kind", ["epsilon", "fisher"])
def test_another_runs_private_file_is_refused(runs: Path, tmp_path: Path, kind: str) -> None:
    """Of the same shapes, with a checksum of its own that is right."""
    folder = Path(shutil.copytree(runs / f"{kind}-one", tmp_path / "run"))
    shutil.copy(runs / f"{kind}-other" / "checkpoint-2" / PRIVATE, folder / "checkpoint-2")
    for asked in (True, str(folder / "checkpoint-2")):
        t = trainer(folder, kind, max_steps=3)
        with pytest.raises(ValueError, match=rf"{PRIVATE} is cut off or was changed"):
            t.train(resume_from_checkpoint=asked)
    assert t.state.global_step == 0


def without_epsilon(folder: Path) -> None:
    """A private file whose account was emptied, and whose checksum is right."""
    from hf_gradguard.training.checkpoints.private_state import save_private_state
    from hf_gradguard.training.message import Client

    (folder / PRIVATE).unlink()
    save_private_state(str(folder), 0, [Client(make_defense("none"))], None)


def without_private_file(folder: Path) -> None:
    (folder / PRIVATE).unlink()


@pytest.mark.parametrize("damage", [without_epsilon, without_private_file])
def test_an_account_that_was_emptied_is_refused(
    runs: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = Path(shutil.copytree(runs / "epsilon-one", tmp_path / "run"))
    damage(folder / "checkpoint-2")
    (folder / "checkpoint-2" / "gradguard_complete.json").unlink()  # as older versions saved
    with pytest.raises(ValueError, match=r"no count of the messages.*dp_sgd with per_sample"):
        resume(folder, "epsilon")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, r"label_epsilon=3, and now protect_labels is not set.*Set both"),
        ({**LABELS, "label_epsilon": 2.0}, r"label_epsilon=3, and 2 would release"),
    ],
)
def test_other_label_protection_is_refused(
    runs: Path, tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    folder = Path(shutil.copytree(runs / "labels", tmp_path / "run"))
    with pytest.raises(ValueError, match=says):
        resume(folder, "epsilon", **settings)
    assert resume(folder, "epsilon", **LABELS).state.global_step == 3


def test_labels_that_were_true_are_not_protected_later(runs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs / "epsilon-one", tmp_path / "run"))
    with pytest.raises(ValueError, match="release each label a second time"):
        resume(folder, "epsilon", **LABELS)


@pytest.mark.parametrize("kind", ["epsilon", "fisher"])
@pytest.mark.parametrize("change", ["order", "two rows", "one row", "one row less"])
def test_other_rows_are_refused(runs: Path, tmp_path: Path, kind: str, change: str) -> None:
    folder = Path(shutil.copytree(runs / f"{kind}-one", tmp_path / "run"))
    t = trainer(folder, kind, max_steps=3)
    rows = list(t.train_dataset)
    t.train_dataset = {
        "order": rows[::-1],
        "two rows": [rows[5], *rows[1:5], rows[0], *rows[6:]],
        "one row": [{**rows[0], "labels": (rows[0]["labels"] + 1) % 3}, *rows[1:]],
        "one row less": rows[:-1],
    }[change]
    with pytest.raises(ValueError, match=r"other rows, or on these in another order.*train_data"):
        t.train(resume_from_checkpoint=str(folder / "checkpoint-2"))


class Augmented:
    """Another view of a row at every visit, by draws of its own."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.stream = rows, torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        ids = self.rows[row]["input_ids"].clone()
        ids[int(torch.randint(4, (), generator=self.stream))] = 3
        return {**self.rows[row], "input_ids": ids}


def test_rows_that_are_drawn_anew_are_the_same_rows(tmp_path: Path) -> None:
    for asked in (None, True):
        t = trainer(tmp_path, "fisher", max_steps=3 if asked else 2, save_steps=2)
        t.train_dataset = Augmented(list(t.train_dataset))
        t.train_dataset.stream.manual_seed(5 if asked else 1)
        t.train(resume_from_checkpoint=asked)
    assert t.state.global_step == 3


def flip(file: Path) -> None:
    state = load_file(file)
    name = next(name for name in state if name.endswith("dense.weight"))
    state[name] = -state[name]
    save_file(state, file, {"format": "pt"})


def test_weights_that_were_changed_are_refused(tmp_path: Path) -> None:
    """Of the same size, whatever the defense."""
    t = trainer(tmp_path, "fisher", max_steps=2, save_steps=1)
    plain = {"model": t.model, "train_dataset": t.train_dataset, "defense": "pruning"}
    GradGuardTrainer(args=t.args, **plain).train()
    size = (tmp_path / "checkpoint-2" / "model.safetensors").stat().st_size
    flip(tmp_path / "checkpoint-2" / "model.safetensors")
    assert (tmp_path / "checkpoint-2" / "model.safetensors").stat().st_size == size
    for asked in (True, str(tmp_path / "checkpoint-2")):
        with pytest.raises(ValueError, match=r"model\.safetensors .* was changed.*checkpoint-1"):
            GradGuardTrainer(args=t.args, **plain).train(resume_from_checkpoint=asked)


def test_what_defenses_remember_is_of_their_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in one process, clients forget when the defense or the division of rows changes."""
    t = trainer(tmp_path, "fisher", max_steps=2, save_steps=2)

    def made(steps: int, **settings: Any) -> GradGuardTrainer:
        args = GradGuardConfig(
            str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True, save_steps=2,
            max_steps=steps, per_device_train_batch_size=4, num_clients=2, **settings,
        )  # fmt: skip
        feedback = make_defense("pruning", ratio=0.5, error_feedback=True)
        return GradGuardTrainer(t.model, args, defense=feedback, train_dataset=t.train_dataset)

    made(2).train()
    made(3).train(resume_from_checkpoint=True)
    assert "was saved with other" not in caplog.text
    made(3, partition="dirichlet").train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "was saved with other partition" in caplog.text


def test_a_trainer_with_messages_of_its_own_takes_no_other_run(runs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs / "epsilon-one", tmp_path / "run"))
    t = trainer(tmp_path / "own", "epsilon", max_steps=1)
    t.train()
    with pytest.raises(ValueError, match="Make a new Trainer"):
        t.train(resume_from_checkpoint=str(folder / "checkpoint-2"))


def test_another_defense_keeps_what_epsilon_counts(runs: Path, tmp_path: Path) -> None:
    """As in one process: the model is of those messages, too."""
    folder = Path(shutil.copytree(runs / "epsilon-one", tmp_path / "run"))
    t = trainer(folder, "fisher", max_steps=3, save_steps=3)
    other = GradGuardTrainer(
        model=t.model, args=t.args, defense="pruning", train_dataset=t.train_dataset
    )
    other.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    again = trainer(folder, "epsilon", max_steps=4)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    assert sum(again.private_rows.account.messages.values()) == 2 + 1


def test_an_accountant_of_the_user_goes_on(runs: Path, tmp_path: Path) -> None:
    """A release is what its step adds."""
    one, other = FisherAccountant(), FisherAccountant()
    values = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.1, 0.2, 0.3])
    one.step([3, 3, 5], *values)
    other.add_release(other.release([3, 3, 5], *values))
    assert {key: one.dfil(key) for key in one} == {key: other.dfil(key) for key in other}
    assert one.standard_error(3) == other.standard_error(3)
