"""Plays three sites on this machine, with Flower's messages and rows that come with the package.

    python examples/hospitals/play.py  # a minute; pip install '.[demo,flower]'

It writes a folder for each site, as three machines would have it, and has each load what it got.
"""

import argparse
from pathlib import Path

from hospitals import client_app, make_head, server_app
from transformers import pipeline

from hf_gradguard.demo import packaged_encoder, sentences
from hf_gradguard.testing.flower import run_in_process

LABELS = ["negative", "positive"]


def write_sites(folder: Path) -> list[dict[str, str]]:
    """Rows of three sites of different sizes, in files of their own, and 160 public texts."""
    rows = sentences("train")
    public, own = rows[:160], rows[160:]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "public.txt").write_text("\n".join(text for text, _ in public), encoding="utf-8")
    nodes = []
    for number, (start, end) in enumerate([(0, 140), (140, 220), (220, 280)], 1):
        site = folder / f"site-{number}"
        site.mkdir(parents=True, exist_ok=True)
        lines = ["text\tlabel", *(f"{text}\t{LABELS[label]}" for text, label in own[start:end])]
        (site / "rows.tsv").write_text("\n".join(lines), encoding="utf-8")
        names = {"data": "rows.tsv", "output": "my-head", "state": "state"}
        node = {key: str(site / name) for key, name in names.items()}
        nodes.append(node | {"head": str(folder / "head")})
    return nodes


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", default="runs/hospitals", help="a new folder")
    parser.add_argument("--encoder", help="by default MiniLM of the extra `demo`")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args(arguments)
    folder = Path(given.output)
    nodes = write_sites(folder)
    flags = ["--encoder", given.encoder or packaged_encoder(), "--rows", "280", "--labels", *LABELS]
    flags += ["--public", str(folder / "public.txt"), "--output", str(folder / "head")]
    make_head.main(flags)
    config = {
        "head": str(folder / "head"), "output": str(folder / "server"), "sites": 3,
        "num-server-rounds": given.rounds,
    }  # fmt: skip
    run_in_process(client_app.app, server_app.app, nodes, config)
    held_out = sentences("dev")
    for number, node in enumerate(nodes, 1):
        classify = pipeline("text-classification", model=node["output"])
        found = [answer["label"] for answer in classify([text for text, _ in held_out])]
        right = sum(name == LABELS[label] for name, (_, label) in zip(found, held_out, strict=True))
        print(f"site {number}: accuracy {right / len(held_out):.3f} -> {node['output']}")


if __name__ == "__main__":
    main()
