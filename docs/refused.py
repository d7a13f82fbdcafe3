"""Makes the page of what `GradGuardTrainer` refuses, from the rules themselves."""

from __future__ import annotations

import re
from typing import Any

from mkdocs.structure.files import File, Files

from hf_gradguard.training.refusals import GROUPS

PAGE = "refused.md"
HEAD = """# What is refused

`GradGuardTrainer` refuses what it could not protect: better no training than one that only looks
protected. Each refusal is an `UnsupportedError` (a `NotImplementedError`). Its message ends with
the name of a rule, as in `[deepspeed]`. This page lists all rules; `…` stands for what your set-up
says there.
"""


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, PAGE, content=page()))
    return files


def page() -> str:
    """The page, as Markdown."""
    lines = [HEAD]
    for title, rules in GROUPS.items():
        lines += [f"## {title}\n", "| Rule | What, and why | Instead |", "|---|---|---|"]
        for rule in rules:
            cells = f"`{rule.name}`", _shown(rule.reason), _shown(rule.way_out)
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _shown(text: str) -> str:
    """A rule's text without values: `{name}` is what a set-up says, `{{` is a brace."""
    text = re.sub(r"(?<!\{)\{\w+(![rs])?(:\w+)?\}(?!\})", "…", text)
    return text.replace("{{", "{").replace("}}", "}").replace("|", "\\|")
