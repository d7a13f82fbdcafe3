"""`recipes/image_classification.py` on this rank, with the flags it is given."""

from __future__ import annotations

import sys

from launcher import begin

from recipes import image_classification


def main() -> None:
    _, flags = begin()
    sys.argv = ["recipes/image_classification.py", *flags]
    image_classification.main()


if __name__ == "__main__":
    main()
