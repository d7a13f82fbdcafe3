"""A private head on two ranks, of which the second has found its directions with other signs."""

from __future__ import annotations

import os

import torch
from examples import example_names
from launcher import begin, finish

from hf_gradguard import GradGuardTrainer, private_head

PUBLIC = ["a good film", "a bad film", "the plot is slow", "it is a joke", "very warm", "dull"]


def main() -> None:
    folder, _ = begin()
    names = example_names("model tokenizer")
    head = private_head(names["model"], PUBLIC, processing_class=names["tokenizer"])
    if os.environ["RANK"] == "1":
        head.directions.weight.neg_()
        head.directions.bias.neg_()
    rows = [{"text": text, "label": place % 2} for place, text in enumerate(PUBLIC * 4)]
    args = head.training_arguments(
        str(folder / "out"), num_rows=len(rows), per_device_train_batch_size=4, use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = GradGuardTrainer(head, args, train_dataset=rows)
    trainer.train()
    assert trainer.private_rows is not None
    finish(
        folder,
        {
            "features": trainer.train_dataset[:]["features"].tolist(),
            "weights": head.head.weight.tolist(),
            "moved": bool(head.head.weight.any()),
            "steps": trainer.state.global_step,
            "epsilon": trainer.private_rows.epsilon,
            "norm": float(torch.as_tensor(trainer.train_dataset[0]["features"]).norm()),
        },
    )


if __name__ == "__main__":
    main()
