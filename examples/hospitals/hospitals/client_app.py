"""A site: trains on its own rows, and sends one protected message a round."""

from flwr.app import Context
from transformers import AutoModelForSequenceClassification

from hf_gradguard.data.files import load_rows
from hf_gradguard.heads import HeadClient
from hf_gradguard.heads.flower import head_app


def make_client(context: Context) -> HeadClient:
    """Its rows and the noise before them are the site's own business: its node says which."""
    node = context.node_config
    return HeadClient(
        AutoModelForSequenceClassification.from_pretrained(node["head"]),
        load_rows(node["data"]),
        messages=context.run_config["num-server-rounds"],
        noise_multiplier=node.get("noise-multiplier"),
        state_folder=node["state"],
    )


app = head_app(make_client)
