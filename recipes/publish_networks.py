r"""Push an evaluation network to the Hub, or several: each becomes NAMESPACE/folder-name.

    python recipes/publish_networks.py NAMESPACE model_cards/*/
    python recipes/publish_networks.py --private NAMESPACE \
        model_cards/image-evaluation-network-32

Log in first with `hf auth login`, or set HF_TOKEN. `gradguard evalnet push FOLDER REPO` does the
same for one folder.
"""

import argparse
from pathlib import Path

from hf_gradguard.networks.loading import push_network


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("namespace", help="your user name or organization")
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--private", action="store_true", help="if the repository is created now")
    args = parser.parse_args()
    for folder in args.folders:
        print(
            push_network(folder, f"{args.namespace}/{folder.resolve().name}", private=args.private)
        )


if __name__ == "__main__":
    main()
