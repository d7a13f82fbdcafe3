"""Makes the head that all sites begin with, of public texts alone. One of them, or the server, runs
it once, and gives everybody the folder.

    python -m hospitals.make_head --encoder sentence-transformers/all-mpnet-base-v2 \
        --public public.txt --labels negative positive --rows 2400 --output head
"""

import argparse

from hf_gradguard import private_head


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--encoder", required=True, help="a folder, or a name on the Hub")
    parser.add_argument("--public", required=True, help="a file of texts that are nobody's secret")
    parser.add_argument("--labels", nargs="+", required=True, help="the classes' names, in order")
    parser.add_argument("--rows", type=int, required=True, help="of all sites, roughly")
    parser.add_argument("--output", default="head", help="the folder that everybody gets")
    given = parser.parse_args(arguments)
    head = private_head(given.encoder, given.public, labels=given.labels, num_rows=given.rows)
    head.save_pretrained(given.output)


if __name__ == "__main__":
    main()
