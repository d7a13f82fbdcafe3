"""`gradguard train` on this rank, with the flags it is given."""

from __future__ import annotations

import sys

from launcher import begin

from hf_gradguard import cli


def main() -> None:
    _, flags = begin()
    sys.exit(cli.main(["train", *flags]))


if __name__ == "__main__":
    main()
