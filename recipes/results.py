"""Makes docs/results.md anew: runs its commands, which go on with what is missing, and puts their
tables in place.

    MODEL=... SST2=... MNIST=... python recipes/results.py              run all, hours where \
        nothing is there yet
    MODEL=... SST2=... MNIST=... python recipes/results.py span_attack  only commands that mention \
        this
    python recipes/results.py --tables                                  no command, only tables

The page is the list of commands: each block marked `bash` is one. Variables on it ($MODEL, ...) are
read from the environment. A table stands between `<!-- results/NAME.md -->` and `<!-- / -->`, and
is that file.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "results.md"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="*", help="parts of the commands to run")
    parser.add_argument("--tables", action="store_true", help="run no command")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    known = [] if args.tables else commands(args.page.read_text(encoding="utf-8"))
    chosen = [
        command for command in known if not args.only or any(part in command for part in args.only)
    ]
    if missing := sorted(
        {name for name in re.findall(r"\$(\w+)", " ".join(chosen)) if name not in os.environ}
    ):
        sys.exit(f"Set {', '.join(missing)} in the environment: {args.page} says what they are.")
    for command in chosen:
        print(f"\n{command}")
        subprocess.run(["bash", "-ec", command], cwd=args.page.parents[1], check=True)
    args.page.write_text(filled(args.page), encoding="utf-8")


def commands(page: str) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL)


def filled(page: Path) -> str:
    """The page with its tables as their files are."""

    def table(found: re.Match) -> str:
        return (
            f"<!-- {found[1]} -->\n{(page.parent / found[1]).read_text(encoding='utf-8')}<!-- / -->"
        )

    return re.sub(
        r"<!-- (\S+\.md) -->\n.*?<!-- / -->",
        table,
        page.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    main()
