"""The guard between a client's training and the network, whichever framework sends.

A guard is on as soon as it exists. It protects the difference between the weights that a client got
and those that it wants to send, and refuses to send anything else.
"""

from __future__ import annotations

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
from ..defenses.base import State
from ..gradient_map import Tensors
from ..gradient_map.views import PrecomputedGradient
from ..randomness import Stream
from ..registry import DEFENSES
from .lookup_tables import PREFIX, TABLES, check_tables, matches
from .packing import pack

logger = logging.get_logger(__name__)

STATISTICS = "*running_mean, *running_var, *num_batches_tracked"
"""The names of batch normalization's running statistics, which are averages of a client's data."""
UNCHANGED = "unchanged"
Withheld = Literal["zeros", "left out"]
Sends = Literal["weights", "difference"]
_GRID = 64  # so many entries may lie on a grid by chance


@dataclass(frozen=True)
class GuardSettings:
    """The settings of a guard, which all have defaults, so that a guard without settings is on.

    Args:
        defense: The defense's name. `"none"`, and only that, turns protection off.
        settings: The defense's settings. Noise needs a stated `scale` here; `protect_update`, which
            has the data, takes a relative one too.
        withhold: Patterns of names that are not sent, with commas between them. Default: running
            statistics of batch normalization.
        withheld: `"zeros"` sends the received value, which is a change of zero; `"left out"` leaves
            the name out, for servers that merge by name.
        tables: Patterns of the names of matrices that the data looks up, with commas between them:
            which of their rows changed names the words. Default: their usual names (`TABLES`); and
            then every other matrix is refused of which some rows did not change at all. A list of
            your own model's tables is trusted.
        frozen: Patterns of the names of weights that no client trains, with commas between them:
            they get no noise. Default: `"unchanged"`, what came back as it was received to the last
            bit. A layer that no sample of a round used (a single expert, an adapter of another
            language) comes back so too, and shows it: list what is frozen (nothing: `"-"`).
        sends: What the client returns: its new `"weights"`, or their `"difference"` from those it
            got.
        share_input_embeddings: Whether to send tables although their rows say which words were
            there.
        allow: Names of other records that may pass unread, with commas between them.
        state_folder: A further folder of the defense's state, for frameworks that lose it with the
            process.
        packed: Whether to send protected updates in few bytes: sparse ones as position and value,
            quantized ones at their bits. The server has to unpack them. Whole weights are then sent
            as their difference too, which they round.

    Example:
        >>> config = {"gradguard.defense": "pruning", "gradguard.pruning.ratio": 0.8, "rounds": 3}
        >>> GuardSettings.parse(config).settings
        {'ratio': 0.8}
    """

    defense: str = "gaussian_noise"
    settings: Mapping[str, Any] = field(default_factory=dict)
    withhold: str = STATISTICS
    withheld: Withheld = "zeros"
    tables: str = TABLES
    frozen: str = UNCHANGED
    sends: Sends = "weights"
    share_input_embeddings: bool = False
    allow: str = ""
    state_folder: str = ""
    packed: bool = False

    def __post_init__(self) -> None:
        for name, choices in (("withheld", Withheld), ("sends", Sends)):
            if getattr(self, name) not in get_args(choices):
                words = " or ".join(repr(choice) for choice in get_args(choices))
                raise ValueError(f"{PREFIX}{name} must be {words}, not {getattr(self, name)!r}.")
        for name in ("share_input_embeddings", "packed"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{PREFIX}{name} must be true or false.")
        make_defense(self.defense, **self.settings)  # a wrong name or value stops here

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> GuardSettings:
        """Return the settings in a run's flat configuration; hyphens in names count as underscores.

        A defense's own settings stand under its name (`gradguard.pruning.ratio`), so that a run may
        choose another defense without removing them.

        Raises:
            ValueError: If an entry under `gradguard.` is unknown (the message lists the entries),
                or a value is out of range.
            TypeError: If the defense does not have a setting.
        """
        arguments = [field.name for field in fields(cls) if field.name != "settings"]
        given_arguments: dict[str, Any] = {}
        defense_settings: dict[str, dict[str, Any]] = {}
        for key, value in config.items():
            if key != PREFIX[:-1] and not key.startswith(PREFIX):
                continue
            name, _, setting = key.removeprefix(PREFIX).replace("-", "_").partition(".")
            if name in DEFENSES and setting:
                defense_settings.setdefault(name, {})[setting] = value
            elif name in arguments and not setting:
                given_arguments[name] = value
            else:
                raise ValueError(
                    f"There is no {key!r}. Under {PREFIX} there are {', '.join(arguments)}, and "
                    f"each defense's settings under its name: {', '.join(DEFENSES)}."
                )
        defense = given_arguments.get("defense", cls.defense)
        return cls(**given_arguments, settings=defense_settings.get(defense, {}))

    @property
    def on(self) -> bool:
        """Whether anything is protected."""
        return self.defense != "none"

    def is_withheld(self, name: str) -> bool:
        """Return whether a name is not sent."""
        return matches(name, self.withhold)


class Guard:
    """The guard of one client: a defense, and the defense's state of this client.

    Args:
        settings: The settings of the guard.

    Example:
        >>> guard = Guard(GuardSettings(settings={"scale": 0.1}))
        >>> received = {"w": torch.zeros(4)}
        >>> trained = {"w": torch.ones(4)}
        >>> bool((guard.protect(received, trained)["w"] == trained["w"]).any())
        False
    """

    def __init__(self, settings: GuardSettings) -> None:
        self.settings = settings
        self.defense: Defense = make_defense(settings.defense, **settings.settings)
        if not settings.on:
            logger.warning_once("gradguard.defense is 'none': what clients train is sent as it is.")
        if getattr(self.defense, "correlated", False):
            logger.warning_once(_protection_of_transcript(self.defense))

    @property
    def kind(self) -> dict[str, str]:
        """The defense and its settings, which say whether a stored state fits."""
        settings = repr(sorted(self.defense.settings().items(), key=str))
        return {"defense": self.settings.defense, "settings": settings}

    @property
    def state(self) -> State:
        """The defense's state of this client, a value that later messages do not change.

        An app that protects where its data is calls `guard.defense`, which moves this state on.
        """
        tensors = self.defense.state_dict()
        return self.defense.unflatten({name: tensor.clone() for name, tensor in tensors.items()})

    @state.setter
    def state(self, state: State) -> None:
        self.defense.load_state_dict(self.defense.flatten(state))

    def remembered(self) -> Tensors:
        """Return the tensors of the defense's state, on the CPU."""
        return {name: tensor.cpu() for name, tensor in self.defense.state_dict().items()}

    def save_state(self, folder: str | Path, client: str) -> None:
        """Store the defense's state in a private file of this client and this defense.

        Args:
            folder: The folder of the file. It is made if needed.
            client: The client's name, which begins the file's name.
        """
        path = self._file(folder, client)
        make_private_folder(path.parent)
        write_private(path, save(self.remembered(), metadata=self.kind))

    def load_state(self, folder: str | Path, client: str) -> bool:
        """Load the state that `save_state` stored, and return whether there was one.

        Args:
            folder: The folder of the file.
            client: The client's name.

        Raises:
            ValueError: If the file is damaged.
        """
        tensors = self.stored(folder, client)
        if tensors is not None:
            self.defense.load_state_dict(tensors)
        return tensors is not None

    def stored(self, folder: str | Path, client: str) -> Tensors | None:
        """Return the tensors that `save_state` stored; `None` if it stored none.

        Args:
            folder: The folder of the file.
            client: The client's name.

        Raises:
            ValueError: If the file is damaged.
        """
        path = self._file(folder, client)
        if not path.exists():
            return None
        try:
            return load(path.read_bytes())
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged. Delete it to start anew.") from error

    def _file(self, folder: str | Path, client: str) -> Path:
        kind = hashlib.sha256(repr(self.kind).encode()).hexdigest()[:16]
        return Path(folder) / f"{client}-{kind}.safetensors"

    def protect(
        self,
        received: Mapping[str, Tensor],
        trained: Mapping[str, Tensor],
        generator: Stream | None = None,
    ) -> Tensors:
        """Return what to send in place of `trained`.

        The defense's state moves on with the message. It stays as it was if nothing is returned.

        Args:
            received: The weights that the client got.
            trained: The weights, or their difference, that the client wants to send.
            generator: The source of randomness, as for `Defense.__call__`.

        Raises:
            ValueError: If `trained` is not weights trained from `received`, or a table would say by
                its rows what was in the data.
            FloatingPointError: If something is not finite. With correlated noise such an update
                counts as none, and its message is noise alone.
            RuntimeError: If the defense needs the client's data.
        """
        try:
            check_difference(received, trained, self.settings.sends)
            change = self.change(received, trained) if self.settings.on else {}
        except (ValueError, FloatingPointError) as error:
            if not self._counts_as_none(received, trained, error):
                raise
            logger.warning_once(_ADDS_NOTHING.format(type(error).__name__))
            change = self._no_change(received)
        if not self.settings.on:
            return dict(trained)
        aliases = tied_names(received, change)
        trainable = [name for name in change if name not in self._frozen(change)]
        distinct = {name: change[name] for name in trainable if name not in aliases}
        if self.defense.facts.follows_transcript:
            name = f"{PREFIX}{self.settings.defense}"
            raise ValueError(
                f"Nothing was sent: {name} has no stated strength. Relative to this very update it "
                "would show that one's norm, and the usual update is found by training on random "
                f"inputs, which only protect_update does. Give {name}.scale, a standard deviation "
                "in the unit of the weights, or protect where the data is."
            )
        message, state = self.defense.apply(PrecomputedGradient(distinct), self.state, generator)
        # One tensor of the model gets one noise, whatever the number of its names.
        update = {n: message[aliases.get(n, n)] for n in trainable}
        answer = self.sent(received, update)
        self.state = state
        return answer

    def _counts_as_none(
        self, received: Mapping[str, Tensor], trained: Mapping[str, Tensor], error: Exception
    ) -> bool:
        """Return whether an update that would be refused is sent as a change of zero.

        With correlated noise, ε is stated for all that is in an update, whatever replaces it. So
        nothing in the update may decide whether something is sent. The names and types of its
        tensors are the app's doing, and so is whatever is refused before the first message.
        """
        if not self._is_correlated:
            return False
        is_of_values = received.keys() == trained.keys() and all(
            (t.shape, t.dtype) == (received[n].shape, received[n].dtype) for n, t in trained.items()
        )
        return is_of_values and (isinstance(error, FloatingPointError) or self.position > 0)

    def _no_change(self, received: Mapping[str, Tensor]) -> Tensors:
        return {
            name: torch.zeros_like(_wide(tensor))
            for name, tensor in received.items()
            if tensor.is_floating_point() and not self.settings.is_withheld(name)
        }

    @property
    def _is_correlated(self) -> bool:
        return bool(getattr(self.defense, "correlated", False))

    @property
    def position(self) -> int:
        """The number of messages with correlated noise that this client has sent.

        It is 0 with other defenses.
        """
        return position_in(self.defense.state_dict())

    def _frozen(self, change: Mapping[str, Tensor]) -> set[str]:
        if self.settings.frozen != UNCHANGED:
            return {name for name in change if matches(name, self.settings.frozen)}
        unchanged = {name for name, tensor in change.items() if not tensor.any()}
        if len(unchanged) == len(change):
            return set()
        if self._is_correlated:
            # All messages are of the same entries, and no update may decide which.
            if unchanged and not self.position:
                raise ValueError(_FROZEN.format(min(unchanged)))
            return set()
        return unchanged

    def change(self, received: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> Tensors:
        """Return the difference to protect, in at least float32.

        It has all floating-point tensors that are not withheld.

        Raises:
            ValueError: If nothing is left, for a table of the input, or for what was trained in
                half precision.
        """
        sends_weights = self.settings.sends == "weights"
        change = {
            name: (_wide(tensor) - _wide(received[name])) if sends_weights else _wide(tensor)
            for name, tensor in trained.items()
            if tensor.is_floating_point() and not self.settings.is_withheld(name)
        }
        if not change:
            raise ValueError("There is nothing to send: every tensor is withheld.")
        for name, tensor in change.items():
            if sends_weights:
                _check_precision(name, received[name])
            _check_grid(name, _wide(received[name]), tensor)
        if not self.settings.share_input_embeddings:
            check_tables(received, change, self.settings.tables)
        return change

    def sent(self, received: Mapping[str, Tensor], message: Mapping[str, Tensor]) -> Tensors:
        """Return a protected update as it is sent: new weights, their difference, or bytes.

        Args:
            received: The weights that the client got.
            message: The protected update. Names that it lacks were withheld.

        Raises:
            ValueError: If whole weights are in half precision.
        """
        sends_weights, packed = self.settings.sends == "weights", self.settings.packed
        answer: Tensors = {}
        for name, start in received.items():
            change = message.get(name)
            if change is not None and sends_weights and self.settings.on:
                _check_precision(name, start)
            if change is None and self.settings.withheld != "zeros":
                continue
            if packed and start.is_floating_point():
                dtype = _wide(start).dtype if sends_weights else start.dtype
                change = torch.zeros_like(start) if change is None else change
                answer[name] = pack(change.to(dtype), is_added=sends_weights)
            elif change is None:
                answer[name] = start if sends_weights else torch.zeros_like(start)
            else:
                answer[name] = (_wide(start) + change if sends_weights else change).to(start.dtype)
        return answer


def position_in(state: Mapping[str, Tensor]) -> int:
    """Return how many messages with correlated noise a client had sent when its state was stored.

    Args:
        state: The tensors of the state.

    Example:
        >>> position_in({})
        0
    """
    plans = [tensor for name, tensor in state.items() if name == PLAN]
    return int(plans[0][1]) if plans else 0


def _protection_of_transcript(defense: Any) -> str:
    """Return what `dp_sgd` with correlated noise promises for all of a client's updates.

    Raises:
        ValueError: If the defense's settings do not fit updates.
    """
    from ..leakage import gaussian_epsilon
    from ..leakage.differential_privacy import protection_note

    if defense.per_sample:
        raise ValueError(
            f"{PREFIX}dp_sgd.per_sample clips single rows' gradients, and an update has none. "
            "Leave it out, and give scale and clip_by='norm' of updates."
        )
    if defense.messages is None:
        raise ValueError(
            f"{PREFIX}dp_sgd.messages is missing: in how many rounds at most this client trains, "
            "for which correlated noise is planned."
        )
    often = defense.participations or 1
    apart = f", {defense.min_separation} apart or more" if defense.min_separation else ""
    text = (
        f"dp_sgd with correlated=True hides data that is in {often} of at most {defense.messages} "
        f"updates{apart}, and it is up to the app to train on no row more often: noise multiplier "
        f"{defense.client_noise_multiplier:.4g} of all updates together"
    )
    if defense.delta is not None:
        epsilon = gaussian_epsilon(defense.client_noise_multiplier, defense.delta)
        text += f", ε = {epsilon:.4g} at δ = {defense.delta:g}{protection_note(epsilon)}"
    return (
        f"{text}. A round that is repeated is one more update of its data, and what a client that "
        "lost its state, or goes on from an earlier one, shares adds up with what it shared before."
    )


def tied_names(received: Mapping[str, Tensor], change: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the further names of tensors that have several, each with the tensor's first name.

    Frameworks exchange copies, so values decide: those of one tensor were equal before training,
    and changed equally.

    Args:
        received: The weights that the client got.
        change: The change of all of them, or of some.

    Example:
        >>> change = {"embed": torch.rand(3), "norm": torch.zeros(3)}
        >>> change["head"] = change["embed"].clone()
        >>> tied_names(dict.fromkeys(change, torch.ones(3)), change)
        {'head': 'embed'}
    """
    first_names: dict[Any, list[str]] = {}
    aliases: dict[str, str] = {}
    for name, tensor in change.items():
        if (tensor == tensor.flatten()[:1]).all():
            continue  # weights that start or stay alike, such as biases at zero, are not one
        # Few entries tell most apart, so that hardly any pair is compared whole.
        sketch = (tuple(tensor.shape), *tensor.flatten()[:8].tolist())
        for first_name in first_names.setdefault(sketch, []):
            if torch.equal(received[name], received[first_name]) and torch.equal(
                tensor, change[first_name]
            ):
                aliases[name] = first_name
                break
        else:
            first_names[sketch].append(name)
    return aliases


def check_difference(
    received: Mapping[str, Tensor], trained: Mapping[str, Tensor], sends: Sends
) -> None:
    """Check that one set of tensors can be the outcome of training from the other.

    Args:
        received: The weights that the client got.
        trained: The tensors that the client wants to send.
        sends: `"weights"` if those are weights, or `"difference"` if they are a difference.

    Raises:
        ValueError: If names, shapes or types differ, or if the tensors look like weights where a
            difference is expected, or the other way round.
        FloatingPointError: If something is not finite.

    Example:
        >>> check_difference({"w": torch.ones(2)}, {"w": torch.ones(3)}, "weights")
        Traceback (most recent call last):
        ValueError: Nothing was sent: 'w' has shape (3,) and not (2,).
    """
    if unmatched := sorted(set(received) ^ set(trained)):
        which = "was not among the weights received" if unmatched[0] in trained else "is missing"
        raise ValueError(f"Nothing was sent: {unmatched[0]!r} {which}.")
    for name, tensor in trained.items():
        for property_name, has, expected in (
            ("shape", tuple(tensor.shape), tuple(received[name].shape)),
            ("type", tensor.dtype, received[name].dtype),
        ):
            if has != expected:
                raise ValueError(
                    f"Nothing was sent: {name!r} has {property_name} {has} and not {expected}."
                )
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise FloatingPointError(f"Nothing was sent: {name!r} is not finite.")
    sizes = [
        sum(float(_wide(t).square().sum()) for t in tensors.values() if t.is_floating_point())
        for tensors in (received, trained)
    ]
    if sends == "weights" and sizes[1] < 0.25 * sizes[0]:
        raise ValueError(
            "Nothing was sent: what should be weights is less than half as large as those that "
            "were received, as if it were their difference. If it is, say so by "
            f"{PREFIX}sends = 'difference'."
        )
    if sends == "difference" and _cosine(received, trained) > 0.9:
        raise ValueError(
            "Nothing was sent: what should be a difference of weights points where the weights "
            "themselves do, as if it were the weights."
        )


def _cosine(weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> float:
    """Return the cosine between two sets of tensors."""
    names = [name for name, tensor in weights.items() if tensor.is_floating_point()]
    pairs = [(_wide(weights[name]), _wide(tensors[name])) for name in names]
    norms = [sum(float(pair[k].square().sum()) for pair in pairs) ** 0.5 for k in (0, 1)]
    product = sum(float((a * b).sum()) for a, b in pairs)
    return product / (norms[0] * norms[1]) if all(norms) else 0.0


PLAN = "noise_stream/plan"
"""The name, in a defense's state, of two numbers of messages with correlated noise.

They are the number that the noise was planned for, and the number that was sent.
"""
_ADDS_NOTHING = (
    "{}: this update counts as none, and its message is noise alone. A client that sent nothing "
    "would tell what is in its data. Only this process is told. Look for rates at which training "
    "diverges, and for what changed since the first round."
)
_FROZEN = (
    "Nothing was sent: {!r} came back as it was received. With correlated noise all messages are "
    f"of the same weights, and the data may not decide which: list what no client trains in "
    f"{PREFIX}frozen (nothing: '-')."
)


def _check_precision(name: str, start: Tensor) -> None:
    if start.dtype.itemsize < 4:
        raise ValueError(
            f"Nothing was sent: {name!r} is {start.dtype}, in which rounding takes the protection "
            "off again: noise below half of a weight's last digit is lost. Train and exchange "
            "float32."
        )


def _check_grid(name: str, start: Tensor, change: Tensor) -> None:
    """Refuse a change whose weights lie on the grid of half precision.

    An entry of float32 lies there by chance once in thousands.

    Raises:
        ValueError: If most of the changed weights do.
    """
    changed = change != 0
    trained = (start + change)[changed]
    for dtype in (torch.bfloat16, torch.float16):
        if 2 * int((trained.to(dtype) == trained).sum()) > max(len(trained), _GRID):
            raise ValueError(
                f"Nothing was sent: {name!r} was trained in {dtype}. Its weights are on a grid, "
                "and who knows that rounds noise below half of its spacing off again. Train in "
                "float32; autocast (bf16=True) is fine."
            )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
