r"""The same without Flower: each site starts one process of `accelerate launch` on its machine.

    accelerate launch --num_machines 3 --num_processes 3 --machine_rank 0 \
        --main_process_ip 10.0.0.1 --main_process_port 29500 \
        -m hospitals.ranks --head head --data rows.tsv --output my-head

Given several files, it plays a site for each rank on one machine. A row is in one message of 16, as
many messages as the smallest site has.
"""

import argparse

import torch
from accelerate import PartialState
from accelerate.utils import gather
from transformers import AutoModelForSequenceClassification

from hf_gradguard import GradGuardTrainer
from hf_gradguard.data.files import load_rows

SIZE = 16


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--head", required=True, help="the folder that everybody has")
    parser.add_argument("--data", nargs="+", required=True, help="this site's rows")
    parser.add_argument("--output", required=True, help="the trained head's folder at this site")
    parser.add_argument("--noise_multiplier", type=float, default=1.5)
    parser.add_argument("--use_cpu", action="store_true")
    given = parser.parse_args(arguments)
    if given.noise_multiplier <= 0:
        parser.error(
            "--noise_multiplier must be above 0: only behind a proof has a rank fixed rows"
        )
    state = PartialState(cpu=given.use_cpu)
    rank, sites = state.process_index, state.num_processes
    rows = load_rows(given.data[rank % len(given.data)])
    head = AutoModelForSequenceClassification.from_pretrained(given.head)
    counts = torch.tensor([len(rows)], device=state.device)
    fewest = int((gather(counts) if sites > 1 else counts).min())

    # A Trainer gives rank r every n-th row of a data set: here every row of its own.
    own = rows.select([place // sites for place in range(sites * len(rows))])
    args = head.training_arguments(
        given.output,
        num_rows=sites * fewest,
        max_steps=fewest // SIZE,
        noise_multiplier=given.noise_multiplier,
        use_cpu=given.use_cpu,
    )
    trainer = GradGuardTrainer(head, args, train_dataset=own)
    trainer.train()
    folder = given.output if len(given.data) == 1 else f"{given.output}/site-{rank + 1}"
    trainer.accelerator.end_training()  # among ranks, the first alone would save
    head.save_pretrained(folder)


if __name__ == "__main__":
    main()
