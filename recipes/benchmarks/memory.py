"""Memory, in gradients: what `squared_sensitivity` takes by method, and what a message does beyond
the gradient that a stock step has.

A message is of one sentence, so that activations do not hide the rest. "Measuring" is one at which
averages are fed; the others come in between.
"""

from hf_gradguard import GradientMap, make_defense

from .measuring import bytes_of, classifier, peak, random_batch, share

BATCH, LENGTH, PROBES = 16, 16, 2
METHODS = {
    "differences, split by sample": {},
    "differences": {"split": False},
    "exact": {"method": "exact"},
}


MESSAGES = {
    "none": ("none", {}),
    "gaussian_noise": ("gaussian_noise", {}),
    "pruning": ("pruning", {"ratio": 0.9}),
    "optimal_noise, in between": ("optimal_noise", {}),
    "optimal_noise, measuring": ("optimal_noise", {"refresh_every": 1}),
    "optimal_pruning, in between": ("optimal_pruning", {"ratio": 0.9}),
}


def measure(args) -> dict:
    model = classifier(args.model)
    batch = random_batch(model, 2 if args.quick else BATCH, LENGTH)
    gradient = bytes_of(GradientMap(model, batch).parameters.values())
    peaks = {}
    for method, settings in METHODS.items():
        gmap = GradientMap(model, batch, second_order=method == "exact")
        gmap.squared_sensitivity(1, **settings)  # trials, and graphs, come first
        used = peak(
            lambda gmap=gmap, settings=settings: gmap.squared_sensitivity(PROBES, **settings)
        )
        peaks[method] = round(used / gradient, 2)
    sentence, messages = random_batch(model, 1, LENGTH), {}

    def stock() -> None:
        model(**sentence).loss.backward()

    def message(defense) -> None:
        share(defense, GradientMap(model, sentence, second_order=False))

    shared = set(GradientMap(model, sentence).parameters)
    for name, parameter in model.named_parameters():  # a stock step of the same parameters
        parameter.requires_grad_(name in shared)
    unit = peak(stock)
    for row, (name, settings) in MESSAGES.items():
        defense = make_defense(name, **settings)
        model.zero_grad()
        message(defense)  # trials, and the first averages
        model.zero_grad()
        messages[row] = round((peak(lambda defense=defense: message(defense)) - unit) / gradient, 2)
    model.zero_grad()
    return {
        "messages": messages,
        "batch": list(batch["input_ids"].shape),
        "probes": PROBES,
        "gradient_bytes": gradient,
        "gradients": peaks,
    }


def table(report: dict) -> tuple[list[str], list]:
    header = ["", f"peak, in gradients of {report['gradient_bytes'] / 2**20:.3g} MiB"]
    rows = [
        (f"`squared_sensitivity`, {method}", f"{p:.2f}")
        for method, p in report["gradients"].items()
    ]
    message_rows = [(f"message: {row}", f"{p:+.2f}") for row, p in report["messages"].items()]
    return header, [*rows, ("**beyond a stock step**", ""), *message_rows]
