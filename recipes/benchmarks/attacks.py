"""How fast TAG runs, beside the plainest correct implementation: sentences attacked one by one, and
several at once.

The plain implementation differentiates the loss by all parameters with `create_graph=True`, writes
TAG's distance down as it is printed, and differentiates again. Both start at the same input: their
objectives are compared before anything is timed.
"""

import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.gradient_map.parameters import layer_numbers

from .measuring import cells, classifier, clock, random_batch, spread

LENGTH, ROUNDS = 16, 3
STEPS = 100  # of an attack, each time; setting up and decoding count too


def measure(args) -> dict:
    torch.set_num_threads(1)
    steps, rounds = (3, 1) if args.quick else (STEPS, ROUNDS)
    model = classifier(args.model).eval()
    observations = []
    for _ in range(8):
        batch = random_batch(model, 1, LENGTH)
        gradient = GradientMap(model, batch).gradient()
        observations.append(
            Observation(model, gradient, input_shape=(1, LENGTH), labels=batch["labels"])
        )
    start = torch.randn(1, LENGTH, model.config.hidden_size, device=model.device) * 0.05
    attack = make_attack("tag", steps=steps, start=start)

    def plain() -> list[float]:
        return plain_tag(model, observations[0], start, steps)

    ours, theirs = torch.tensor(attack(observations[0]).history), torch.tensor(plain())
    # Later, rounding grows: Adam follows signs.
    torch.testing.assert_close(ours[:25], theirs[:25], rtol=1e-3, atol=0)
    cases = {
        "one sentence": (lambda: attack(observations[0]), 1),
        "eight sentences together": (lambda: attack.reconstruct_many(observations), 8),
    }
    report: dict = {"threads": 1, "length": LENGTH, "cases": {}}
    for label, (run, count) in cases.items():
        run(), plain()
        slow, fast = zip(*((clock(plain) * count, clock(run)) for _ in range(rounds)), strict=True)
        report["cases"][label] = {
            "times as fast as plain": spread([a / b for a, b in zip(slow, fast, strict=True)]),
            "steps a second and sentence": round(steps * count / statistics.median(fast), 2),
        }
    return report


def plain_tag(
    model: torch.nn.Module, observation: Observation, start: torch.Tensor, steps: int
) -> list[float]:
    """TAG as it is printed, with Transformers' own `inputs_embeds`. Returns the objective at every
    step.
    """
    embedding = model.get_input_embeddings().weight
    parameters = {name: p for name, p in model.named_parameters() if p is not embedding}
    layers = layer_numbers(parameters)
    x = start.clone().requires_grad_()
    mask = torch.ones(x.shape[:2], dtype=torch.long, device=x.device)
    optimizer = torch.optim.AdamW([x], lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (step + 1) / 51 if step < 50 else (steps - step) / (steps - 50)
    )
    history = []
    for _ in range(steps):
        with sdpa_kernel(SDPBackend.MATH):  # no fused kernel has second derivatives
            loss = model(inputs_embeds=x, attention_mask=mask, labels=observation.labels).loss
            leaves = list(parameters.values())
            gradients = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
        value = torch.zeros((), device=x.device)
        for (name, layer), gradient in zip(layers.items(), gradients, strict=True):
            difference = gradient - observation.gradient[name]
            weight = 0.1 * (1 - (layer - 1) / max(layers.values()))
            value = value + 0.5 * difference.square().sum() + weight * difference.abs().sum()
        (x.grad,) = torch.autograd.grad(value, x)
        optimizer.step()
        schedule.step()
        history.append(float(value.detach()))
    return history


def table(report: dict) -> tuple[list[str], list[list[str]]]:
    return ["", "times as fast", "range", "steps a second and sentence"], [
        [
            label,
            *cells(case["times as fast as plain"]),
            f"{case['steps a second and sentence']:.1f}",
        ]
        for label, case in report["cases"].items()
    ]
