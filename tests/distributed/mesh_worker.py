"""Two clients of two devices each, beside two clients that hold whole models."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import recording
import torch
import torch.distributed as dist
from examples import example_names
from helpers import make_task, token_batch
from launcher import begin, finish
from peft import LoraConfig, get_peft_model
from scipy.stats import ks_2samp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from hf_gradguard import GradientMap, protect
from hf_gradguard.defenses import Defense, chain, make_defense
from hf_gradguard.defenses.base import first_not_finite
from hf_gradguard.defenses.noise import GaussianNoise
from hf_gradguard.defenses.pruning import largest
from hf_gradguard.defenses.sensitivity import Averages
from hf_gradguard.gradient_map.parameters import is_sharded
from hf_gradguard.randomness import Stream
from hf_gradguard.sharded.shards import Shards, whole_of

ROOT = Path(__file__).resolve().parents[2]
CLIENTS, SHARDS = 2, 2
STEPS, DRAWS, PROBES = 2, 50, 100
Task = Callable[[], nn.Module]


class NamedRecorder(recording.Recorder):
    """As a dimension of a mesh."""

    def _set_group_name(self, name: str) -> None:
        self.own_name = name

    def _set_group_desc(self, name: str) -> None:
        self.own_desc = name

    group_name = property(lambda self: self.own_name)
    group_desc = property(lambda self: self.own_desc)


def _recorder(options: Any, _: Any) -> NamedRecorder:
    group = NamedRecorder(options.store, options.group_rank, options.group_size, options.timeout)
    group._set_group_name(options.group_id)
    return group


def make_mesh() -> DeviceMesh:
    """Whatever leaves a client is recorded: its dimension of the mesh, and the group of all."""
    dist.Backend.register_backend("recorder", _recorder, extended_api=True, devices=["cpu"])
    dist.init_process_group("recorder", timeout=timedelta(seconds=60))
    return init_device_mesh(
        "cpu",
        (CLIENTS, SHARDS),
        mesh_dim_names=("clients", "shards"),
        backend_override={"shards": "gloo"},
    )


class Mixed(nn.Module):
    """What does not come in equal rows: matrices of 5 rows and of 1, a bias whose gradient is one
    number all over (ties), a second table, and a number that `fully_shard` is to ignore.
    """

    def __init__(self, bend: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.bend = bend
        self.words, self.pairs = nn.Embedding(24, 8), nn.Embedding(48, 8)
        self.hidden, self.narrow = nn.Linear(8, 5), nn.Linear(5, 1)
        self.flat, self.head = nn.Parameter(torch.zeros(7)), nn.Linear(5, 3)
        self.factor = nn.Parameter(torch.tensor(1.5))

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Tensor) -> dict[str, Tensor]:
        x = self.words(input_ids) + self.pairs(input_ids + input_ids.roll(1, 1))
        x = self.bend(self.hidden(x))
        x = (x + self.narrow(x)).mean(1) * self.factor + self.flat.sum()
        return {"loss": nn.functional.cross_entropy(self.head(x), labels)}


def seeded(model: nn.Module) -> nn.Module:
    """No parameter is zero, as LoRA's B would be."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model.double().eval()


def full() -> nn.Module:
    return make_task("bert")[0]


def lora() -> nn.Module:
    config = LoraConfig(r=1, target_modules=["query", "value"])  # one row, of one device
    return seeded(get_peft_model(make_task("bert")[0], config))


def mixed() -> nn.Module:
    return seeded(Mixed())


def kinked() -> nn.Module:
    return seeded(Mixed(torch.relu))


def rows(client: int, device: int | None = None) -> dict[str, Tensor]:
    """A client's batch, or a device's half of it."""
    first = 4 * client + 2 * (device or 0)
    some = slice(first, first + (4 if device is None else 2))
    return {key: value[some] for key, value in token_batch(4 * CLIENTS, 5).items()}


def shard(model: nn.Module, mesh: DeviceMesh, **settings: Any) -> nn.Module:
    """Each layer of an encoder, and what is left."""
    for module in model.modules():
        if type(module).__name__ == "BertLayer":
            fully_shard(module, mesh=mesh, **settings)
    ignored = {p for p in model.parameters() if not p.dim()}
    return fully_shard(model, mesh=mesh, ignored_params=ignored, **settings)


def whole(tensor: Any) -> Tensor:
    found = tensor.detach()
    return found.full_tensor() if hasattr(found, "full_tensor") else found.clone()


def part(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Place:
    """This rank's, and what is compared."""

    def __init__(self) -> None:
        self.mesh = make_mesh()
        self.client, self.device = divmod(dist.get_rank(), SHARDS)
        group = self.mesh["clients"].get_group()
        assert isinstance(group, NamedRecorder)
        self.across = group

    def batch(self, model: nn.Module) -> dict[str, Tensor]:
        return rows(self.client, self.device if is_sharded(model) else None)

    def train(self, model: nn.Module, defense: Defense) -> dict[str, Tensor]:
        """The weights after some steps, and the last gradient."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        for _ in range(STEPS):
            optimizer.zero_grad()
            protect(model, self.batch(model), defense, clients=self.mesh["clients"])
            optimizer.step()
        found = {name: whole(p) for name, p in model.named_parameters()}
        return found | {
            f"{n}.grad": whole(p.grad) for n, p in model.named_parameters() if p.grad is not None
        }

    def identity(self, task: Task, make: Callable[[], Defense]) -> dict[str, Any]:
        one, two = (
            self.train(task(), make()),
            self.train(shard(task(), self.mesh["shards"]), make()),
        )
        start = {name: p.detach() for name, p in task().named_parameters()}
        return {
            "error": max(float((one[n] - two[n]).abs().max()) for n in one),
            "moved": max(float((one[n] - start[n]).abs().max()) for n in start),
            # what is zero but for rounding, as biases of keys, is not told from zero
            "kept": all(
                torch.equal(one[n].abs() > 1e-12, two[n].abs() > 1e-12)
                for n in one
                if n.endswith(".grad")
            ),
            "same names": one.keys() == two.keys(),
        }


DETERMINISTIC: dict[str, Callable[[], Defense]] = {
    "none": lambda: make_defense("none"),
    "pruning": lambda: make_defense("pruning", ratio=0.9),
    "pruning by utility": lambda: make_defense("pruning", utility=0.7),
    "feedback": lambda: make_defense("pruning", ratio=0.8, error_feedback=True),
    "quantization": lambda: make_defense("quantization", bits=3),
    "signs": lambda: make_defense("quantization", sign_only=True),
    "clipping": lambda: make_defense("dp_sgd", scale=0.0, clip=0.1),
    "clipping entries": lambda: make_defense("optimal_dp_sgd", scale=0.0, clip=0.02, shape="past"),
    "chain": lambda: chain(make_defense("pruning", ratio=0.5), make_defense("quantization")),
}
JUDGED = ("none", "pruning", "quantization")


def ties(place: Place) -> bool:
    """Whether the largest entries of cut tensors are those of the whole ones, where many are
    equal.
    """
    model = shard(mixed(), place.mesh["shards"])
    generator, same = torch.Generator().manual_seed(3), True
    shards = Shards(model)
    for _ in range(20):
        cut, all_ = {}, {}
        for name, parameter in model.named_parameters():
            shape = parameter.shape
            all_[name] = torch.randint(3, shape, generator=generator).double()
            cut[name] = part(
                whole_of(parameter, all_[name])
                if not shape
                else distribute_tensor(all_[name], place.mesh["shards"], [Shard(0)])
            )
        flat = torch.cat([tensor.flatten() for tensor in cut.values()])
        parts = {name: tensor.numel() for name, tensor in cut.items()}
        every = torch.cat([tensor.flatten() for tensor in all_.values()])
        amount = int(torch.randint(1, len(every), (), generator=generator))
        mask = largest(flat, amount, None, parts, shards).split(list(parts.values()))
        wanted = largest(every, amount).split([t.numel() for t in all_.values()])
        for (name, parameter), own, right in zip(
            model.named_parameters(), mask, wanted, strict=True
        ):
            mine = own.view(cut[name].shape).long()
            same &= torch.equal(whole(whole_of(parameter, mine)).flatten().bool(), right)
    return same


def noise_of(place: Place, defense: str) -> dict[str, Any]:
    """Noise on a client's message, in the standard deviations that it should have: with a sharded
    model, and with a whole one.
    """
    one, two = mixed(), shard(mixed(), place.mesh["shards"])
    protect(one, place.batch(one), "none")
    true = {n: p.grad.clone() for n, p in one.named_parameters() if p.grad is not None}
    size = sum(g.numel() for g in true.values())
    std = float(sum(g.square().sum() for g in true.values()) / size) ** 0.5
    found: dict[str, list[Tensor]] = {"whole": [], "sharded": [], "factor": [], "both": []}
    made = make_defense(defense, relative_scale=2.0, strength="own")
    for _ in range(DRAWS):
        for kind, model in (("whole", one), ("sharded", two)):
            for parameter in model.parameters():
                parameter.grad = None
            protect(model, place.batch(model), made)
            noise = {n: (whole(p.grad) - true[n]) / (2 * std)
                     for n, p in model.named_parameters() if n in true}  # fmt: skip
            found[kind].append(torch.cat([tensor.flatten() for tensor in noise.values()]))
        found["factor"].append(noise["factor"].view(1))
        rows_ = noise["hidden.weight"]  # rows of the first device and of the second
        found["both"].append((rows_[:2] * rows_[3:]).flatten())
    whole_, sharded = (torch.cat(found[kind]) for kind in ("whole", "sharded"))
    return {
        "statistic": float(ks_2samp(whole_.numpy(), sharded.numpy()).statistic),
        "count": len(whole_),
        "power": float(sharded.square().mean()),
        "shards' correlation": float(torch.cat(found["both"]).mean()),
        "products": DRAWS * 16,
        "factor": torch.cat(found["factor"]).tolist(),
        "repeats": len(sharded) - len(sharded.unique()),
    }


def gathered(gmap: GradientMap, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: whole(whole_of(p, parts[name])) for name, p in gmap.parameters.items()}


def sensitivities(place: Place) -> dict[str, float]:
    """Differences of a sharded model's gradients, against second derivatives of a whole one."""
    exact = {name: torch.zeros_like(p) for name, p in mixed().named_parameters()}
    gmap = GradientMap(mixed(), rows(place.client))
    for direction in torch.eye(gmap.input.numel(), dtype=torch.float64):
        for name, column in gmap.jvp(direction.view_as(gmap.input)).items():
            exact[name] += column.square()
    model = shard(mixed(), place.mesh["shards"])
    shards = Shards(model)
    cut = GradientMap(model, place.batch(model), second_order=False, shards=shards)
    stream = shards.new_message(Stream.from_seeds(1, place.client, place.device))
    squares = cut.squared_sensitivity(PROBES, stream)
    cut_sums = Averages().with_batch(squares.items(), cut.gradient(), shards=shards)
    ratio = gathered(cut, {n: r.contiguous() for n, r in cut_sums.ratio(shards=shards).items()})
    found, gradient = gathered(cut, squares), gathered(cut, cut.gradient())
    sums = Averages().with_batch(found.items(), gradient)
    one = torch.cat([found[n].flatten() for n in found])
    other = torch.cat([exact[n].flatten() for n in found])
    shape = max(float((ratio[n] / sums.ratio()[n] - 1).abs().max()) for n in found)
    return {
        "error": float((one - other).norm() / other.norm()),
        "trace": float(one.sum() / other.sum()),
        "ratio": shape,
    }


def crossing(place: Place) -> dict[str, Any]:
    """What leaves a client in the second step of several: how much, and how like the gradient."""
    found: dict[str, Any] = {}
    for name, settings in (
        ("none", {}),
        ("gaussian_noise", {"relative_scale": 30.0, "strength": "own"}),
    ):
        model, defense = shard(full(), place.mesh["shards"]), make_defense(name, **settings)
        protect(model, place.batch(model), "none")
        trained = [p for p in model.parameters() if p.grad is not None]
        true = torch.cat([part(p.grad).flatten() for p in trained])
        protect(model, place.batch(model), "none")
        twice = torch.cat([part(p.grad).flatten() for p in trained])
        protect(model, place.batch(model), defense, clients=place.mesh["clients"])
        groups = place.across, dist.group.WORLD
        for group in groups:
            group.sent.clear()
            group.on = True
        protect(model, place.batch(model), defense, clients=place.mesh["clients"])
        for group in groups:
            group.on = False
        found[name] = {
            "sizes": [len(tensor) for _, tensor in place.across.sent],
            "own": len(true),
            "cosine": [float(torch.cosine_similarity(t, true, 0)) for _, t in place.across.sent],
            "accumulates": torch.equal(twice, 2 * true),
            "elsewhere": len(dist.group.WORLD.sent),
        }
    return found


def shaped(place: Place) -> dict[str, Any]:
    """Defenses by sensitivity: the noise's power over what was asked for, and what is kept."""
    found: dict[str, Any] = {}
    for shape in ("public", "past", "own"):
        powers, model = [], shard(full(), place.mesh["shards"])
        protect(model, place.batch(model), "none")
        true = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        size = sum(g.numel() for g in true.values())
        noise = make_defense("optimal_noise", relative_scale=2.0, strength="own", shape=shape)
        pruning = make_defense("optimal_pruning", ratio=0.9, shape=shape)
        for _ in range(2):
            grads = []
            for defense in (noise, pruning):
                model.zero_grad()
                protect(model, place.batch(model), defense)
                grads.append({n: whole(p.grad) for n, p in model.named_parameters() if n in true})
            left = grads[1]
            powers.append(sum(float((grads[0][n] - g).square().sum()) for n, g in true.items()))
        wanted = 4.0 * sum(float(g.square().sum()) for g in true.values())
        found[shape] = {
            "power": sum(powers) / len(powers) / wanted,
            "kept": sum(int((g != 0).sum()) for g in left.values()),
            "size": size,
            "true": all(
                bool(((g == 0) | ((g - true[n]).abs() < 1e-12)).all()) for n, g in left.items()
            ),
        }
    return found


class Own(GaussianNoise):
    """Says nothing of shards."""


def refusals(place: Place) -> dict[str, str]:
    """What is refused, and how: on all ranks, none of which waits for another."""
    mesh = place.mesh
    small = shard(mixed(), mesh["shards"])
    bent = shard(kinked(), mesh["shards"])
    columns = lambda p: Shard(1) if p.dim() > 1 else Shard(0)  # noqa: E731
    model = {
        "hsdp": shard(full(), mesh),
        "columns": shard(full(), mesh["shards"], shard_placement_fn=columns),
    }
    batch = place.batch(small)

    def outside() -> None:
        gmap = GradientMap(small, batch, second_order=False, shards=Shards(small))
        make_defense("gaussian_noise")(gmap)

    def infinite() -> None:
        value = float("inf") if place.device else 1.0
        tensors = {"hidden.weight": torch.ones(2), "head.weight": torch.tensor([value])}
        raise FloatingPointError(f"{first_not_finite(tensors, Shards(small))} broke")

    calls: dict[str, Callable[[], Any]] = {
        "soteria": lambda: protect(small, batch, "soteria"),
        "refiner": lambda: protect(small, batch, "refiner"),
        "per sample": lambda: protect(
            small, batch, make_defense("dp_sgd", per_sample=True, noise_multiplier=1.0)
        ),
        "layer": lambda: protect(small, batch, make_defense("optimal_noise", granularity="layer")),
        "chain": lambda: protect(
            small, batch, chain(make_defense("pruning"), make_defense("soteria"))
        ),
        "subclass": lambda: protect(small, batch, Own()),
        "kinks": lambda: protect(bent, batch, make_defense("optimal_noise", shape="past")),
        "hsdp": lambda: protect(model["hsdp"], batch, "none"),
        "columns": lambda: protect(model["columns"], batch, "none"),
        "all ranks": lambda: protect(small, batch, "none", clients=dist.group.WORLD),
        "accelerator": lambda: protect(small, batch, "none", SimpleNamespace(num_processes=4)),
        "both": lambda: protect(mixed(), batch, "none", SimpleNamespace(), clients=mesh["clients"]),
        "map": lambda: GradientMap(small, batch),
        "outside": outside,
        "infinite": infinite,
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except (NotImplementedError, ValueError, RuntimeError, FloatingPointError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def page(place: Place) -> dict[str, Any]:
    """The block of the documents, on this mesh."""
    text = (ROOT / "docs" / "sharded.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    (code,) = [block for block in blocks if "fully_shard(" in block]
    lines = [line for line in code.splitlines() if not line.startswith("mesh = ")]
    names = example_names() | {"protect": protect, "mesh": place.mesh}
    names["loader"] = [{k: v[place.device : place.device + 1] for k, v in names["batch"].items()}]
    before = {name: p.detach().clone() for name, p in names["model"].named_parameters()}
    exec("\n".join(lines), names)
    after = {name: whole(p) for name, p in names["model"].named_parameters()}
    return {
        "moved": max(float((after[n] - before[n]).abs().max()) for n in after),
        "checksum": [float(tensor.double().sum()) for tensor in after.values()],
    }


def main() -> None:
    folder, _ = begin()
    place = Place()
    results: dict[str, Any] = {"ties": ties(place), "refusals": refusals(place)}
    results["identity"] = {
        f"{task.__name__}, {defense}": place.identity(task, DETERMINISTIC[defense])
        for task in (full, lora, mixed)
        for defense in (DETERMINISTIC if task is mixed else JUDGED)
    }
    results["gaussian"] = noise_of(place, "gaussian_noise")
    results["laplace"] = noise_of(place, "laplace_noise")
    results["sensitivities"] = sensitivities(place)
    results["crossing"] = crossing(place)
    results["shaped"] = shaped(place)
    results["page"] = page(place)
    finish(folder, results)


if __name__ == "__main__":
    main()
