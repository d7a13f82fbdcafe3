"""Which families, constructions and sizes."""

FAMILIES = {
    "SEQUENCE_CLASSIFICATION": """albert bart bert big_bird biogpt bloom camembert convbert deberta
        deberta-v2 distilbert electra ernie gemma2 gpt2 gpt_neox llama mistral modernbert mpnet opt
        phi3 qwen2 qwen3 roberta xlm-roberta""",
    "CAUSAL_LM": "falcon gemma3_text granite mamba olmo2 phi smollm3 stablelm",
    "SEQ_TO_SEQ_CAUSAL_LM": "marian pegasus",
    "IMAGE_CLASSIFICATION": "beit convnext deit dinov2 mobilenet_v2 resnet vit",
}
WIDTHS = {"tiny": 48, "wide": 384}
SEEDS = range(1)
CONSTRUCTIONS = (
    "imprint module (Robbing the Fed)",
    "imprint in a transformer (Decepticons)",
    "one class let through (Fishing)",
    "trap weights (Curious Abandon Honesty)",
    "rows in pairs",
    "attention on single tokens",
)
HONEST = "none of them"
FROZEN = "none of them, first block frozen"
HIDDEN = (0.0, 0.003, 0.03)
"""Noise on the planted weights, of so many times their size."""
PLAN = {"units": 256, "images": 8, "texts": 4, "width": 64}
QUICK = {"units": 64, "images": 4, "texts": 2, "width": 32}
