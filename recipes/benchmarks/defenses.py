"""What protection costs: sensitivities in plain gradients of the same batch, steps in plain steps
(AdamW included).

The floor of a probe by differences is a plain gradient, plus one for all probes; split by sample,
weights have twice as many tokens in one of three products: 4/3. Exact: a plain gradient takes three
products per weight (forward, and two backward), a probe four (two through the graph of ∇_x L,
two through the forward pass), so k probes cost at least 4k/3, plus 2/3 for the forward pass and
∇_x L that they start from.
"""

from collections.abc import Callable

import torch

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.randomness import Stream

from .measuring import (
    RATIO,
    alternate,
    cells,
    classifier,
    plain_gradient,
    random_batch,
    row_title,
    share,
)

THREADS, BATCH, LENGTH, PROBES, ROUNDS = 2, 16, 16, 10, 7
OWN_SHAPE, EVERY_TENTH = {"shape": "own"}, {"refresh_every": 10}
DEFENSES: list[tuple[str, dict]] = [
    ("none", {}),
    ("gaussian_noise", {}),
    ("laplace_noise", {}),
    ("optimal_noise", OWN_SHAPE),
    ("optimal_noise", EVERY_TENTH),
    ("pruning", {"ratio": 0.9}),
    ("pruning", {"utility": 0.9}),
    ("optimal_pruning", {"ratio": 0.9, **OWN_SHAPE}),
    ("optimal_pruning", {"ratio": 0.9, **EVERY_TENTH}),
    ("quantization", {"bits": 4}),
]


def measure(args) -> dict:
    torch.set_num_threads(1 if args.quick else THREADS)
    size, k, rounds = (2, 2, 1) if args.quick else (BATCH, PROBES, ROUNDS)
    model = classifier(args.model)
    batch = random_batch(model, size, LENGTH)
    plain = plain_gradient(model, batch)

    def sensitivities(probes: int, **settings) -> Callable[[], object]:
        second = settings.get("method") == "exact"

        def run() -> None:
            GradientMap(model, batch, second_order=second).squared_sensitivity(probes, **settings)

        return run

    def jvp_loop() -> None:
        for _ in range(k):
            functional_jvp(model, batch)

    gradients = {
        "squared_sensitivity, k=1": alternate(sensitivities(1), plain, rounds),
        f"squared_sensitivity, k={k}, split=False": alternate(
            sensitivities(k, split=False), plain, rounds
        ),
        f"squared_sensitivity, k={k}, method='exact'": alternate(
            sensitivities(k, method="exact"), plain, max(rounds // 2, 1)
        ),
        f"loop over torch.autograd.functional.jvp, k={k}": alternate(
            jvp_loop, plain, max(rounds // 2, 1)
        ),
    }
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
    unit, steps = training_steps(model, batch, optimizer, 1), {}
    for name, settings in DEFENSES:
        count = settings.get("refresh_every", 1)
        label = row_title(f"step with {name}", settings)
        case = training_steps(model, batch, optimizer, count, name, **settings)
        steps[label] = alternate(
            case, unit, rounds if count == 1 else max(rounds // 2, 1), factor=1 / count
        )

    parameters = sum(p.numel() for p in GradientMap(model, batch).parameters.values())
    report = {"batch": [size, LENGTH], "parameters": parameters, "threads": torch.get_num_threads()}
    return report | {"in plain gradients": gradients, "in plain steps, AdamW included": steps}


def training_steps(
    model, batch, optimizer, steps: int, name: str = "", **settings
) -> Callable[[], object]:
    """Training steps with a defense; without a name, the stock forward and backward pass. AdamW
    updates in both.
    """
    generator = Stream.from_seeds(0)

    def run() -> None:
        defense = make_defense(name, **settings) if name else None
        for _ in range(steps):
            if defense is None:
                model(**batch).loss.backward()
            else:
                gmap = GradientMap(model, batch, second_order=defense.facts.needs_second_order)
                share(defense, gmap, generator)
            optimizer.step()
            optimizer.zero_grad()

    return run


def functional_jvp(model: torch.nn.Module, batch: dict) -> None:
    """One Jᵀv in the plainest way: the double-backward jvp of a function that returns all
    gradients.
    """
    parameters = [
        p for n, p in model.named_parameters() if p is not model.get_input_embeddings().weight
    ]
    embeddings = model.get_input_embeddings()(batch["input_ids"]).detach()
    inputs = {key: value for key, value in batch.items() if key != "input_ids"}

    def gradient(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.autograd.grad(
                model(inputs_embeds=x, **inputs).loss, parameters, create_graph=True
            )

    torch.autograd.functional.jvp(gradient, embeddings, torch.randn_like(embeddings))


def table(report: dict) -> tuple[list[str], list[list[str]]]:
    rows = []
    for section in ("in plain gradients", "in plain steps, AdamW included"):
        rows.append([f"**{section}**", "", ""])
        rows += [[label, *cells(ratio)] for label, ratio in report[section].items()]
    return ["", *RATIO], rows
