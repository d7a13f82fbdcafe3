"""Makes the site's links work as they do in the repository.

Pages link files outside of docs/ (`../examples/...`, `../CONTRIBUTING.md`), which MkDocs does not
know. Each such file becomes one of the site: a Markdown file a page, anything else a file to open.
A folder stands for its README. The pages of docs/findings/ enter the navigation by themselves.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = "project"  # the site's folder for what is outside of docs/
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)\s#]+)(?=[)#\s])")


def on_config(config: Any) -> Any:
    evidence, project = (_section(config.nav, name) for name in ("Evidence", "Project"))
    findings = sorted(page.name for page in (ROOT / "docs/findings").glob("*.md"))
    evidence.append({"Findings": [f"findings/{name}" for name in findings]})
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
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    here = page.file.src_uri

    def moved(link: re.Match[str]) -> str:
        target = _target(link[0], _source(here))
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
