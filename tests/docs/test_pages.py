"""Documents show how things are used, and what they show runs.

The Python of a page runs block after block, in one new namespace, as a reader would paste it. What
a page needs it makes itself, in a block to unfold at its head. Examples in docstrings run as tests
of their own; here only that every public name has one.

A block that cannot run says so in a comment above it, with the reason:

    <!-- not run: needs the Hub -->

One that needs a library which is no part of every installation names its module:

    <!-- run with: trl -->
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import shlex
import shutil
import sys
import types
from pathlib import Path

import pytest

import hf_gradguard
from hf_gradguard import demo
from hf_gradguard.cli import main
from tests.helpers import save_demo_encoder

ROOT = Path(__file__).resolve().parents[2]
GLOBS = ("README.md", "docs/*.md", "docs/findings/*.md", "model_cards/*/README.md")
PAGES = sorted(page for pages in GLOBS for page in ROOT.glob(pages))
ROOMS = ["hf_gradguard"] + [
    f"hf_gradguard.{room.name}"
    for room in pkgutil.iter_modules(hf_gradguard.__path__)
    if room.name != "__main__"  # runs when it is imported
]
BLOCK = re.compile(
    r"(?:^<!-- (?:not run|run with): (?P<reason>[^\n]+) -->\n+)?^```python\n(?P<code>.*?)^```$",
    re.M | re.S,
)


def blocks(text: str) -> list[tuple[int, str, str | None]]:
    """Line, code and the reason not to run it, of every Python block of a page."""
    return [
        (text.count("\n", 0, found.start("code")), found["code"], _reason(found))
        for found in BLOCK.finditer(text)
    ]


def _reason(found: re.Match[str]) -> str | None:
    if found[0].startswith("<!-- run with"):
        missing = [m for m in found["reason"].split(", ") if importlib.util.find_spec(m) is None]
        return f"lacks {', '.join(missing)}" if missing else None
    return found["reason"]


@pytest.fixture(scope="session")
def site_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny encoder in the package that the extra `demo` installs."""
    folder = tmp_path_factory.mktemp("site")
    package = folder / demo.ENCODER
    package.mkdir()
    (package / "__init__.py").touch()
    save_demo_encoder(package / "model")
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_runs(
    page: Path, tmp_path: Path, site_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if importlib.util.find_spec(demo.ENCODER) is None:
        monkeypatch.syspath_prepend(site_packages)
    # A module of its own: classes look up theirs, dataclasses for one.
    module = types.ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for line, code, reason in blocks(page.read_text(encoding="utf-8")):
        # Empty lines before it, so that errors name the line of the page.
        compiled = compile("\n" * line + code, str(page), "exec")
        if reason is None:
            exec(compiled, vars(module))


def test_commands_of_the_readme_run(
    tmp_path: Path, site_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order in which they stand, with a tiny model and the packaged sentences as data.

    The demo and recommend take minutes, and have tests of their own. A file of a head's flags is in
    the place of what recommend writes.
    """
    monkeypatch.chdir(tmp_path)
    shutil.copytree(site_packages / demo.ENCODER / "model", tmp_path / "my-model")
    rows = [f"{text}\t{label}" for text, label in demo.sentences("train")]
    (tmp_path / "train.tsv").write_text("\n".join(["sentence\tlabel", *rows]))
    (tmp_path / "public.txt").write_text("\n".join(text for text, _ in demo.sentences("dev")))
    shell = re.findall(r"^```bash\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    lines = "".join(shell).replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines]
    ours = [command[1:] for command in commands if command[0] == "gradguard"]
    assert [command[0] for command in commands if command[0] != "gradguard"] == ["pip"]
    assert [command[0] for command in ours] == ["demo", "recommend", "train", "train", "audit"]
    wanted = "recommend --model my-model --dataset train.tsv --output runs/recommend"
    assert ours[1] == wanted.split()
    flags = {"head": True, "encoder": "my-model", "dataset": "train.tsv", "output": "runs/named"}
    (tmp_path / "runs/recommend").mkdir(parents=True)
    (tmp_path / "runs/recommend/train.yaml").write_text(json.dumps(flags))
    for command in ours[2:]:
        assert main(command) == 0
    for written in ("named/model.safetensors", "head/model.safetensors", "audit/report.html"):
        assert (tmp_path / "runs" / written).exists()


def test_blocks_are_found() -> None:
    skipped = "<!-- not run: needs the Hub -->\n```python\nb\n```\n"
    page = f"```python\na = 1\n```\n\n{skipped}```bash\nc\n```"
    assert blocks(page) == [(1, "a = 1\n", None), (6, "b\n", "needs the Hub")]
    assert blocks("<!-- run with: torch -->\n```python\na\n```\n") == [(2, "a\n", None)]
    lacking = "<!-- run with: torch, no_such_module -->\n```python\na\n```\n"
    assert blocks(lacking) == [(2, "a\n", "lacks no_such_module")]
    assert any(blocks(page.read_text(encoding="utf-8")) for page in PAGES)


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_has_an_example(room: str) -> None:
    module = importlib.import_module(room)
    public = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
    bare = [
        name
        for name, value in public.items()
        if inspect.isroutine(value) or inspect.isclass(value)
        if ">>>" not in (value.__doc__ or "")
    ]
    assert not bare, f"{', '.join(bare)} of {room} lack an example"
