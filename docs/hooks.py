"""Makes pages' figures and tables of docs/results/*.json, and links work as in the repository.

Pages link files outside of docs/ (`../examples/...`, `../CONTRIBUTING.md`), which MkDocs does not
know. Each such file becomes one of the site: a Markdown file a page, anything else a file to open.
A folder stands for its README. A link to figures (`results/NAME.json`) opens their tables. The
addresses that pages had before (`extra.moved` in mkdocs.yml) lead to where their text is now.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from recipes import figures  # noqa: E402

OUTSIDE = "project"  # the site's folder for what is outside of docs/
STUB = """<!doctype html><meta charset="utf-8"><title>Moved</title>
<link rel="canonical" href="{to}"><meta http-equiv="refresh" content="0; url={to}">
<a href="{to}">This page moved.</a>
"""
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)\s#]+)(?=[)#\s])")


def on_config(config: Any) -> Any:
    project = _section(config.nav, "Project")
    project[:] = [f"{OUTSIDE}/{page}" for page in project]
    return config


def on_files(files: Files, config: Any) -> Files:
    # A page from outside links others in its turn.
    unread = [page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")]
    unread += [page.removeprefix(f"{OUTSIDE}/") for page in _section(config.nav, "Project")]
    found = set(unread)
    while unread:
        page = unread.pop()
        if page.endswith(".md"):
            text = (ROOT / page).read_text(encoding="utf-8")
            linked = {_target(link, page) for link in LINK.findall(text)} - {None} - found
            found |= linked
            unread += linked
    for path in sorted(found):
        if not path.startswith("docs/"):
            content = (ROOT / path).read_bytes()
            files.append(File.generated(config, _place(path), content=content))
    for made in [page for page in files if page.src_uri.startswith("results/")]:
        if made.src_uri.endswith(".md"):  # by `make tables`, from older figures perhaps
            files.remove(made)
    for place, text in _result_pages().items():
        files.append(File.generated(config, place, content=text))
    return files


def _result_pages() -> dict[str, str]:
    """A page for each run, with all of its tables."""
    tables = figures.published()
    return {
        f"results/{run.output}.md": figures.result_page(run, tables)
        for run in figures.published_runs()
    }


def on_post_build(config: Any) -> None:
    tables = figures.published()
    moved = {f"findings/{old}": f"findings/{new}" for old, new in config.extra["moved"].items()}
    for run in figures.published_runs():
        others = [table.name for table in tables.of(run) if table.name != run.output]
        moved |= {f"results/{name}": f"results/{run.output}#{name}" for name in others}
    for old, new in moved.items():
        page, _, section = new.partition("#")
        to = f"{posixpath.relpath(page, old)}/{'#' * bool(section)}{section}"
        stub = Path(config.site_dir) / old / "index.html"
        stub.parent.mkdir(parents=True)
        stub.write_text(STUB.format(to=to), encoding="utf-8")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    here = page.file.src_uri
    if not here.startswith((f"{OUTSIDE}/", "results/")):
        markdown = figures.render(markdown, figures.published())

    def moved(link: re.Match[str]) -> str:
        target = _target(link[0], _source(here))
        if target and target.startswith("docs/results/") and target.endswith(".json"):
            target = f"{target.removesuffix('.json')}.md"
        if target is None:  # MkDocs reports it, unless it is code and no link
            return link[0]
        return posixpath.relpath(_place(target), posixpath.dirname(here) or ".")

    return LINK.sub(moved, markdown)


def _section(nav: list[dict[str, list[Any]]], name: str) -> list[Any]:
    return next(part[name] for part in nav if name in part)


def _target(link: str, page: str) -> str | None:
    """The file that a link on that page names, both from the repository's root."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    if (ROOT / path / "README.md").is_file():
        path = f"{path}/README.md"
    return path if (ROOT / path).is_file() else None


def _place(path: str) -> str:
    """Where a file of the repository lies among the site's sources."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{OUTSIDE}/{path}"


def _source(place: str) -> str:
    inside = place.startswith(f"{OUTSIDE}/")
    return place.removeprefix(f"{OUTSIDE}/") if inside else f"docs/{place}"
