"""What a release is made of: `make release` and `make hub`.

python scripts/release.py check --tag v0.3.0
python scripts/release.py try dist/hf_gradguard-0.3.0-py3-none-any.whl
python scripts/release.py hub dist/hub
python scripts/release.py prices examples/space/prices.json
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_gradguard.networks.judging import NetworkMetrics
from hf_gradguard.networks.loading import eval_results

ROOT = Path(__file__).resolve().parent.parent
DATASETS = {"cifar10": "uoft-cs/cifar10", "mnist": "ylecun/mnist", "sst2": "stanfordnlp/sst2",
            "wikitext2": "Salesforce/wikitext"}  # fmt: skip
"""Names on the Hub of the sets that evaluation networks are judged on, by folder."""


def stated_versions(root: Path = ROOT) -> dict[str, str]:
    """The version as each file says it: of the package, the newest in the changelog, the one cited.
    Of SECURITY.md the minor version that gets fixes.
    """
    patterns = {
        "hf_gradguard/__init__.py": r'^__version__ = "(.+)"',
        "CHANGELOG.md": r"^## \[(\d.*?)\]",
        "CITATION.cff": r"^version: (.+)",
        "SECURITY.md": r"^\| ([\d.]+) \| yes \|",
    }
    stated = {}
    for name, pattern in patterns.items():
        match = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        if match is None:
            raise SystemExit(f"{name} states no version.")
        stated[name] = match[1]
    return stated


def check(tag: str | None = None, root: Path = ROOT) -> str:
    """The version that all files state.

    Args:
        tag: Of the release, `v` and the version. The changelog's section Unreleased is then empty.
        root: Of the sources.

    Raises:
        SystemExit: If files or the tag differ, or changes are not in the version's section.
    """
    stated = stated_versions(root)
    version = stated["hf_gradguard/__init__.py"]
    wanted = dict.fromkeys(stated, version) | {"SECURITY.md": version.rsplit(".", 1)[0]}
    differing = [f"{n} says {stated[n]}" for n in stated if stated[n] != wanted[n]]
    if tag is not None and tag != f"v{version}":
        differing.append(f"the tag is {tag}")
    if differing:
        raise SystemExit(f"The package is {version}, but {' and '.join(differing)}.")
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased = changelog.partition("## [Unreleased]")[2].partition("\n## ")[0]
    if tag is not None and unreleased.strip():
        raise SystemExit(
            f"CHANGELOG.md has changes under Unreleased. Move them under [{version}], with a date."
        )
    return version


def try_wheel(wheel: Path) -> str:
    """What `gradguard --version` prints where nothing but the wheel and what it asks for is
    installed, in a folder that has no sources. It reads a packaged network too.
    """
    look = "from hf_gradguard.networks import packaged_networks as p; assert len(p()) == 2, p()"
    torch = re.search(r"^torch==.+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert torch is not None
    with tempfile.TemporaryDirectory() as folder:
        venv.create(f"{folder}/venv", with_pip=True)
        python = f"{folder}/venv/bin/python"
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for commands in ([*pip, torch[0]], [*pip, str(wheel.resolve())], [python, "-c", look]):
            subprocess.run(commands, cwd=folder, check=True)
        printed = subprocess.run(
            [f"{folder}/venv/bin/gradguard", "--version"],
            cwd=folder, check=True, capture_output=True, text=True,
        )  # fmt: skip
    return printed.stdout.strip()


def measured(network: str) -> Iterator[EvalResult]:
    """What an evaluation network was measured to be, for its card's `model-index`."""
    for cell in json.loads((ROOT / "docs/results/evalnets.json").read_text(encoding="utf-8")):
        settings = cell["settings"]
        if settings["network"] == network:
            yield from eval_results(
                NetworkMetrics(**cell["figures"]),
                ", blended" if settings.get("blend") else "",
                task_name="share of random tokens or noise",
                dataset_type=DATASETS[settings["file"].split("/")[0]],
                dataset_name=Path(settings["file"]).name,
            )


def stage_network(source: Path, target: Path) -> None:
    """A packaged network's folder, its figures in the card's front matter."""
    shutil.copytree(source, target)
    card = ModelCard.load(source / "README.md")
    metadata: dict[str, Any] = card.data.to_dict()
    card.data = ModelCardData(
        **metadata, model_name=source.name, eval_results=list(measured(source.name))
    )
    card.save(target / "README.md")


def stage_metric(target: Path) -> None:
    """The metric, as `evaluate.load` finds it in a Space."""
    source = ROOT / "hf_gradguard/metrics/text_reconstruction.py"
    target.mkdir(parents=True)
    shutil.copy(source, target / "text_reconstruction.py")
    (target / "requirements.txt").write_text("hf-gradguard[attacks]\n", encoding="utf-8")
    front = {
        "title": "Text reconstruction", "emoji": "🔍", "colorFrom": "green", "colorTo": "gray",
        "sdk": "static", "license": "apache-2.0", "tags": ["evaluate", "metric", "privacy"],
        "description": "How near reconstructed texts are to the true ones.",
    }  # fmt: skip
    (target / "README.md").write_text(
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n"
        "# Text reconstruction\n\n"
        "How near texts reconstructed from a shared gradient are to the true ones: ROUGE, BLEU, "
        "token F1 and more.\n\n"
        "```python\nimport evaluate\n\n"
        'metric = evaluate.load("hf-gradguard/text_reconstruction")\n'
        'metric.compute(predictions=["a film"], references=["the film"])\n```\n',
        encoding="utf-8",
    )


def prices() -> dict[str, list[float]]:
    """Points of accuracy that each defense loses on SST-2, with their interval, by the label that
    an audit knows it by: of the table of docs/findings/text.md.
    """
    sys.path.insert(0, str(ROOT))
    from recipes.figures import published

    table = published()["frontier_text"].text()
    row = r"^\| `(\w+) (\w+=[\d.]+)` \|[^|]+\| (-?[\d.]+) \[(-?[\d.]+), (-?[\d.]+)\] \|"
    return {
        f"{name}:{setting}": [round(100 * float(share), 1) for share in shares]
        for name, setting, *shares in re.findall(row, table, re.MULTILINE)
    }


def write_prices(file: Path) -> None:
    file.write_text(json.dumps(prices(), indent=1) + "\n", encoding="utf-8")


def stage_hub(target: Path) -> list[Path]:
    """A folder for each repository on the Hub: evaluation networks, the metric, the Space."""
    if target.exists():
        shutil.rmtree(target)
    networks = sorted(path.parent for path in (ROOT / "model_cards").glob("*/config.json"))
    for source in networks:
        stage_network(source, target / source.name)
    stage_metric(target / "text_reconstruction")
    if (space := ROOT / "examples/space").is_dir():
        shutil.copytree(space, target / "space", ignore=shutil.ignore_patterns("__pycache__"))
        write_prices(target / "space/prices.json")
    return sorted(target.iterdir())


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("check").add_argument("--tag")
    actions.add_parser("try").add_argument("wheel", type=Path)
    actions.add_parser("hub").add_argument("folder", type=Path)
    actions.add_parser("prices").add_argument("file", type=Path)
    options = parser.parse_args(arguments)
    if options.action == "check":
        print(check(options.tag))
    elif options.action == "try":
        print(try_wheel(options.wheel))
    elif options.action == "prices":
        write_prices(options.file)
    else:
        for folder in stage_hub(options.folder):
            print(f"hf upload hf-gradguard/{folder.name} {folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
