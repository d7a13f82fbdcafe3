"""The shape of the package: who may import whom, how long a file may be, and where the two
questions are asked that the whole package is about.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import hf_gradguard

PACKAGE = Path(hf_gradguard.__file__).parent
NAME = PACKAGE.name

ROOMS = [
    "testing", "__main__", "cli",
    "demo",
    "recommend",
    "train",
    "bodies", "heads",
    "audit", "federation",
    "training",
    "secure", "sharded",
    "leakage", "attacks", "defenses", "metrics", "networks",
    "gradient_map", "data",
    "randomness", "randomness_kernel", "registry", "models", "flags", "logs", "extras",
]  # fmt: skip
"""From the top. A room imports rooms that come later, and nothing that comes earlier."""

STRANGERS = [("attacks", "defenses"), ("defenses", "attacks"), ("training", "attacks")]
"""Pairs of which the first never imports the second: an attack must not know how a defense is
made, nor a defense which attack it will meet.
"""

SPOKEN_BY_BOTH = {"hf_gradguard.defenses.mechanism"}
"""What strangers share: a defense states the mechanism of its messages, and attacks are granted
it. The module says nothing of how a defense is made.
"""

DERIVATIVES = {
    "sharded/shards.py": "a gradient map's, where `fully_shard` reduces in its backward pass",
    "demo.py": "a server's own, of the sentences in its list",
    "defenses/correlated.py": "a public factor's error, by its parameters",
    "networks/training.py": "trains an evaluation network, on public data",
    "attacks/matching/descent.py": "an attacker's penalties on its own guess",
    "leakage/probes.py": "outputs of drawn inputs, by what layers pass on",
    "training/privacy/private_rows.py": "tries rows one by one, and keeps nothing of it",
    "heads/body.py": "scores of public samples, and of rows that a training is given, by layers",
}
"""Files outside `gradient_map/` that differentiate, and what: never a client's loss."""

DOMAIN = {
    "gradient_map/domain.py": "the place that asks",
    "heads/head.py": "a model declares its main input, and names what its encoder takes",
    "networks/image_network.py": "a model declares its main input",
    "networks/text_network.py": "a model declares its main input",
    "leakage/probes.py": "a model declares its main input",
}
"""Files that may name what tells text from images."""


CORE = (
    "gradient_map", "defenses", "training", "randomness",
    "leakage.accountant", "leakage.balls_in_bins", "leakage.differential_privacy",
    "leakage.loss_distributions",
)  # fmt: skip
"""What a security reviewer reads: how gradients are made, protected, accounted for and shared."""

NOT_CORE = {
    "attacks", "audit", "demo", "federation", "networks", "randomness_kernel", "recommend",
    "secure", "sharded",
}  # fmt: skip
"""Rooms that the core imports nothing of, not even in a function, but for `DOORS`."""

DOORS = {
    ("training.exchange.secure", "secure"): "sums that hide each part, of a Trainer asked for them",
    ("training.sharding", "sharded"): "clients of several devices, of a Trainer asked for them",
    ("defenses.refiner.defense", "networks"): "refiner judges its data by an evaluation network",
    ("defenses.refiner.published", "networks"): "likewise, as published",
    (
        "randomness",
        "randomness_kernel",
    ): "compiled loops, compared with what they replace",
}
"""Who in the core imports a room that is none of it, and why. The list only shrinks."""

NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip

REVIEWED_LINES = 17_580
"""Lines of code of all that a Trainer imports, also in functions, without what is behind a door. It
falls: the goal is 14,000.
"""


@dataclass(frozen=True)
class Import:
    """One import statement's target, a module of the package."""

    target: str
    line: int
    names: tuple[str, ...]


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package, `hf_gradguard` itself under its own name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = [NAME, *path.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(module: str) -> tuple[Import, ...]:
    """All that a module imports from the package, also inside functions and for annotations."""
    path = modules()[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found = []
    for node in ast.walk(tree(path)):
        for target, names in _targets(node, package):
            found.append(Import(target, node.lineno, names))
    return tuple(found)


def _targets(node: ast.AST, package: list[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == NAME:
                yield alias.name, ()
    elif isinstance(node, ast.ImportFrom):
        above = package[: len(package) - node.level + 1] if node.level else []
        source = ".".join([*above, *([node.module] if node.module else [])])
        if source.split(".")[0] != NAME:
            return
        names = [alias.name for alias in node.names]
        inner = [name for name in names if f"{source}.{name}" in modules()]
        yield from ((f"{source}.{name}", ()) for name in inner)
        rest = tuple(name for name in names if name not in inner)
        if rest:
            yield source, rest


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def where(module: str, found: Import) -> str:
    return f"{modules()[module].relative_to(PACKAGE)}:{found.line} imports {found.target}"


def test_every_room_has_its_place() -> None:
    assert {room(module) for module in modules()} - {""} <= set(ROOMS)


def test_no_arrow_upward() -> None:
    wrong = []
    for module in modules():
        if module == NAME:
            continue  # the front, which names what is below it and loads it when asked
        for found in imports(module):
            if found.target == NAME:
                upward = found.names != ("__version__",)
            else:
                upward = ROOMS.index(room(found.target)) < ROOMS.index(room(module))
            if upward:
                wrong.append(where(module, found))
    assert not wrong, "\n".join(wrong)


def is_core(module: str) -> bool:
    name = module.removeprefix(f"{NAME}.")
    return any(name == part or name.startswith(f"{part}.") for part in CORE)


def test_the_core_leaves_by_its_doors() -> None:
    edges = {
        (module.removeprefix(f"{NAME}."), room(found.target))
        for module in modules()
        if is_core(module)
        for found in imports(module)
        if room(found.target) in NOT_CORE
    }
    assert edges == set(DOORS)


def test_doors_are_opened_in_functions_alone() -> None:
    """A Trainer that is not asked for what is behind a door imports nothing of it. Defenses are
    loaded by name.
    """
    program = """
import sys
from hf_gradguard import GradGuardTrainer, make_defense, protect
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("hf_gradguard.")}
print(*sorted(rooms))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not set(run.stdout.split()) & NOT_CORE


def test_what_a_reviewer_reads_does_not_grow() -> None:
    doors = {f"{NAME}.{module}" for module, _ in DOORS}
    reached: set[str] = set()
    waiting = [f"{NAME}.training.trainer"]
    while waiting:
        module = waiting.pop()
        if module not in reached | doors | {NAME}:
            reached.add(module)
            waiting += [found.target for found in imports(module)]
    assert not {room(module) for module in reached} & NOT_CORE
    lines = sum(map(lines_of_code, reached))
    print(f"{lines:,} lines of code in {len(reached)} files")  # pytest -s shows it
    assert lines <= REVIEWED_LINES


def lines_of_code(module: str) -> int:
    """Without comments, docstrings and empty lines."""
    path = modules()[module]
    counted: set[int] = set()
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type not in NO_CODE:
                counted.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            counted.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(counted)


@pytest.mark.parametrize("pair", STRANGERS, ids="-".join)
def test_strangers(pair: tuple[str, str]) -> None:
    wrong = [
        where(module, found)
        for module in modules()
        for found in imports(module)
        if (room(module), room(found.target)) == pair and found.target not in SPOKEN_BY_BOTH
    ]
    assert not wrong, "\n".join(wrong)


def test_no_circle() -> None:
    """Also inside a room, and through imports in functions and for annotations."""
    graph = {
        module: [found.target for found in imports(module) if found.target != NAME]
        for module in modules()
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for target in graph[module]:
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        if module != NAME:
            visit(module, ())


def test_who_differentiates() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in modules().values()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute)
        and (node.attr == "backward" or ast.unparse(node).endswith("autograd.grad"))
    }
    outside = {name for name in found if not name.startswith("gradient_map/")}
    wrong = outside ^ set(DERIVATIVES)
    assert not wrong, "\n".join(sorted(wrong))


def test_no_code_from_elsewhere() -> None:
    """Everything that builds a thing by name says that no code comes with it, and nothing is
    unpickled.
    """
    wrong, found = [], 0
    recipes = (PACKAGE.parent / "recipes").rglob("*.py")
    for path in [*modules().values(), *recipes]:
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            says = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if node.func.attr in ("from_pretrained", "from_config"):
                found += 1
                if says.get("trust_remote_code") != "False":
                    wrong.append(f"{path}:{node.lineno} trusts what it loads")
            called = ast.unparse(node.func)
            if called in ("torch.load", "pickle.load", "pickle.loads", "torch.hub.load"):
                wrong.append(f"{path}:{node.lineno} unpickles")
    assert not wrong, "\n".join(wrong)
    assert found > 20


def test_who_asks_text_or_image() -> None:
    found = {
        str(path.relative_to(PACKAGE)) for path in modules().values() if any(_asks(tree(path)))
    }
    wrong = found ^ set(DOMAIN)
    assert not wrong, "\n".join(sorted(wrong))


def _asks(source: ast.Module) -> Iterator[bool]:
    """Whether each node reads or compares what tells text from images. A dictionary's key does not:
    who makes a batch of images need not ask.
    """
    keys = {id(key) for node in ast.walk(source) if isinstance(node, ast.Dict) for key in node.keys}
    for node in ast.walk(source):
        if isinstance(node, ast.Constant):
            yield id(node) not in keys and node.value in ("pixel_values", "main_input_name")
        elif isinstance(node, ast.Attribute):
            yield node.attr in ("main_input_name", "is_text")
        elif isinstance(node, ast.Name):
            yield node.id in ("main_input_name", "is_text")
        elif isinstance(node, ast.FunctionDef):
            yield node.name == "is_text"
