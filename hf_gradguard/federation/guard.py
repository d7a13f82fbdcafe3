"""What stands between a client's training and the network, whichever framework sends.

A guard is on as soon as it is there. It protects the difference between the weights that a client
got and those that it wants to send; what is no such difference, it refuses to send.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from transformers.utils import logging

from ..data.private import make_private_folder, write_private
from ..defenses import Defense, make_defense
from ..gradient_map import Tensors
from ..gradient_map.views import Given
from ..randomness import Stream
from ..registry import DEFENSES
from .tables import check_tables

logger = logging.get_logger(__name__)

PREFIX = "gradguard."
STATISTICS = "*running_mean, *running_var, *num_batches_tracked"
"""Of batch normalization: averages of a client's data."""
Withheld = Literal["zeros", "left out"]
Sends = Literal["weights", "difference"]
_GRID = 64  # entries that may lie on a grid by chance
_REMEDY = (
    f"Do not train it, name it in {PREFIX}withhold, or set {PREFIX}share_input_embeddings to send "
    "it all the same."
)


@dataclass(frozen=True)
class GuardSettings:
    """How a guard protects. All of it has a default, so that a guard without settings is on.

    Args:
        defense: Its name. `"none"`, and only that, turns protection off.
        settings: Of the defense.
        withhold: Patterns of names that are not sent, with commas between them. Default: running
            statistics of batch normalization.
        withheld: `"zeros"` sends the received value, which is a change of zero; `"left out"` leaves
            the name out, for servers that merge by name.
        sends: What the client returns: its new `"weights"`, or their `"difference"` from those it
            got.
        share_input_embeddings: Send a table although its rows say which words were there.
        allow: Names of other records that may pass unread, with commas between them.
        state_folder: Where the defense's state is kept as well, for frameworks that lose it with
            the process.

    Example:
        >>> config = {"gradguard.defense": "pruning", "gradguard.pruning.ratio": 0.8, "rounds": 3}
        >>> GuardSettings.of(config).settings
        {'ratio': 0.8}
    """

    defense: str = "gaussian_noise"
    settings: Mapping[str, Any] = field(default_factory=dict)
    withhold: str = STATISTICS
    withheld: Withheld = "zeros"
    sends: Sends = "weights"
    share_input_embeddings: bool = False
    allow: str = ""
    state_folder: str = ""

    def __post_init__(self) -> None:
        for name, choices in (("withheld", Withheld), ("sends", Sends)):
            if getattr(self, name) not in get_args(choices):
                words = " or ".join(repr(choice) for choice in get_args(choices))
                raise ValueError(f"{PREFIX}{name} must be {words}, not {getattr(self, name)!r}.")
        if not isinstance(self.share_input_embeddings, bool):
            raise ValueError(f"{PREFIX}share_input_embeddings must be true or false.")
        make_defense(self.defense, **self.settings)  # a wrong name or value stops here

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> GuardSettings:
        """Of a run's flat configuration; hyphens in names count as underscores.

        A defense's own settings stand under its name (`gradguard.pruning.ratio`), so that a run may
        choose another defense and leave them be.

        Raises:
            ValueError: For an entry under `gradguard.` that is none, with those there are, and for
                values out of range.
            TypeError: For a setting that the defense does not have.
        """
        known = [one.name for one in fields(cls) if one.name != "settings"]
        found: dict[str, Any] = {}
        settings: dict[str, dict[str, Any]] = {}
        for key, value in config.items():
            if key != PREFIX[:-1] and not key.startswith(PREFIX):
                continue
            name, _, setting = key.removeprefix(PREFIX).replace("-", "_").partition(".")
            if name in DEFENSES and setting:
                settings.setdefault(name, {})[setting] = value
            elif name in known and not setting:
                found[name] = value
            else:
                raise ValueError(
                    f"There is no {key!r}. Under {PREFIX} there are {', '.join(known)}, and each "
                    f"defense's settings under its name: {', '.join(DEFENSES)}."
                )
        defense = found.get("defense", cls.defense)
        return cls(**found, settings=settings.get(defense, {}))

    @property
    def on(self) -> bool:
        """Whether anything is protected."""
        return self.defense != "none"

    def is_withheld(self, name: str) -> bool:
        """Whether a name is not sent."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in listed(self.withhold))


class Guard:
    """One client's guard, with what its defense remembers.

    Args:
        settings: How it protects.

    Example:
        >>> guard = Guard(GuardSettings())
        >>> before = {"w": torch.zeros(4)}
        >>> after = {"w": torch.ones(4)}
        >>> bool((guard.protect(before, after)["w"] == after["w"]).any())
        False
    """

    def __init__(self, settings: GuardSettings) -> None:
        self.settings = settings
        self.defense: Defense = make_defense(settings.defense, **settings.settings)
        if not settings.on:
            logger.warning_once("gradguard.defense is 'none': what clients train is sent as it is.")

    @property
    def kind(self) -> dict[str, str]:
        """The defense and its settings: what another one remembers is of no use."""
        settings = repr(sorted(self.defense.settings().items(), key=str))
        return {"defense": self.settings.defense, "settings": settings}

    def remembered(self) -> Tensors:
        """What the defense remembers, on the CPU."""
        return {name: tensor.cpu() for name, tensor in self.defense.state_dict().items()}

    def write(self, folder: str | Path, client: str) -> None:
        """Keep what the defense remembers in a private file, of this client and this defense."""
        path = self._file(folder, client)
        make_private_folder(path.parent)
        write_private(path, save(self.remembered(), metadata=self.kind))

    def read(self, folder: str | Path, client: str) -> bool:
        """Take up what `write` kept, if it did.

        Raises:
            ValueError: If the file is damaged.
        """
        path = self._file(folder, client)
        if not path.exists():
            return False
        try:
            state = load(path.read_bytes())
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged. Delete it to start anew.") from error
        self.defense.load_state_dict(state)
        return True

    def _file(self, folder: str | Path, client: str) -> Path:
        kind = hashlib.sha256(repr(self.kind).encode()).hexdigest()[:16]
        return Path(folder) / f"{client}-{kind}.safetensors"

    def protect(
        self,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        generator: Stream | None = None,
    ) -> Tensors:
        """What to send in the place of `after`.

        Args:
            before: The weights that the client got.
            after: What it wants to send.
            generator: As for `Defense.__call__`.

        Raises:
            ValueError: If `after` is not weights trained from `before`, or a table says by its rows
                what was in the data.
            FloatingPointError: If something is not finite.
            RuntimeError: If the defense needs the client's data.
        """
        check_difference(before, after, self.settings.sends)
        if not self.settings.on:
            return dict(after)
        change = self.change(before, after)
        return self.sent(before, self.defense(Given(change), generator))

    def change(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Tensors:
        """The difference that is to be protected: of all floating-point tensors that are not
        withheld, in at least float32.

        Raises:
            ValueError: If nothing is left, for a table of the input, or for what was trained in
                half precision.
        """
        whole = self.settings.sends == "weights"
        change = {
            name: (_wide(tensor) - _wide(before[name])) if whole else _wide(tensor)
            for name, tensor in after.items()
            if tensor.is_floating_point() and not self.settings.is_withheld(name)
        }
        if not change:
            raise ValueError("There is nothing to send: every tensor is withheld.")
        starts = {name: _wide(before[name]) for name in change}
        for name, tensor in change.items():
            if whole:
                _check_precision(name, before[name])
            _check_grid(name, starts[name], tensor)
        if not self.settings.share_input_embeddings:
            check_tables(starts, change, _REMEDY)
        return change

    def sent(self, before: Mapping[str, Tensor], message: Mapping[str, Tensor]) -> Tensors:
        """A protected update as what is sent: new weights, or their difference. What the message
        does not have was withheld.

        Raises:
            ValueError: For whole weights in half precision.
        """
        whole = self.settings.sends == "weights"
        found: Tensors = {}
        for name, start in before.items():
            if name in message:
                change = message[name]
                if whole and self.settings.on:
                    _check_precision(name, start)
                found[name] = (_wide(start) + change if whole else change).to(start.dtype)
            elif self.settings.withheld == "zeros":
                found[name] = start if whole else torch.zeros_like(start)
        return found


def check_difference(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], sends: Sends
) -> None:
    """See that one can be the outcome of training from the other.

    Raises:
        ValueError: If names, shapes or types differ, what should be weights looks like their
            difference, or the other way round.
        FloatingPointError: If something is not finite.

    Example:
        >>> check_difference({"w": torch.ones(2)}, {"w": torch.ones(3)}, "weights")
        Traceback (most recent call last):
        ValueError: Nothing was sent: 'w' has shape (3,) and not (2,).
    """
    if odd := sorted(set(before) ^ set(after)):
        which = "was not among the weights received" if odd[0] in after else "is missing"
        raise ValueError(f"Nothing was sent: {odd[0]!r} {which}.")
    for name, tensor in after.items():
        for what, mine, other in (
            ("shape", tuple(tensor.shape), tuple(before[name].shape)),
            ("type", tensor.dtype, before[name].dtype),
        ):
            if mine != other:
                raise ValueError(f"Nothing was sent: {name!r} has {what} {mine} and not {other}.")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise FloatingPointError(f"Nothing was sent: {name!r} is not finite.")
    sizes = [
        sum(float(_wide(t).square().sum()) for t in tensors.values() if t.is_floating_point())
        for tensors in (before, after)
    ]
    if sends == "weights" and sizes[1] < 0.25 * sizes[0]:
        raise ValueError(
            "Nothing was sent: what should be weights is less than half as large as those that "
            "were received, as if it were their difference. If it is, say so by "
            f"{PREFIX}sends = 'difference'."
        )
    if sends == "difference" and _alike(before, after) > 0.9:
        raise ValueError(
            "Nothing was sent: what should be a difference of weights points where the weights "
            "themselves do, as if it were the weights."
        )


def _alike(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The cosine between two models' weights."""
    names = [name for name, tensor in one.items() if tensor.is_floating_point()]
    pairs = [(_wide(one[name]), _wide(other[name])) for name in names]
    norms = [sum(float(pair[k].square().sum()) for pair in pairs) ** 0.5 for k in (0, 1)]
    product = sum(float((a * b).sum()) for a, b in pairs)
    return product / (norms[0] * norms[1]) if all(norms) else 0.0


def listed(names: str) -> list[str]:
    """Names with commas between them.

    Example:
        >>> listed("a, b,")
        ['a', 'b']
    """
    return [name.strip() for name in names.split(",") if name.strip()]


def _check_precision(name: str, start: Tensor) -> None:
    if start.dtype.itemsize < 4:
        raise ValueError(
            f"Nothing was sent: {name!r} is {start.dtype}, in which rounding takes the protection "
            "off again: noise below half of a weight's last digit is lost. Train and exchange "
            "float32."
        )


def _check_grid(name: str, start: Tensor, change: Tensor) -> None:
    """Entries of float32 fall on those of half precision by chance once in thousands."""
    changed = change != 0
    after = (start + change)[changed]
    for dtype in (torch.bfloat16, torch.float16):
        if 2 * int((after.to(dtype) == after).sum()) > max(len(after), _GRID):
            raise ValueError(
                f"Nothing was sent: {name!r} was trained in {dtype}. Its weights are on a grid, "
                "and who knows that rounds noise below half of its spacing off again. Train in "
                "float32; autocast (bf16=True) is fine."
            )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
