"""What Refiner may do to a batch's continuous input: which entries move, where noise comes from,
and what stays.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...gradient_map import GradientMap, Tensors
from ...gradient_map.domain import embed
from ...gradient_map.inputs import PixelSpace
from ...gradient_map.random_batch import ordinary_ids
from ...networks.base import EvaluationNetworkBase
from ...networks.image import ImageEvaluationNetwork, judge_images
from ...networks.trial import FEW_WORDS, LEAST_GAP, check_order, check_slope
from ...randomness import Stream

LEAST_MOVABLE = 0.9
"""Of a batch's tokens, marks and padding left out, the share that has to be hidden."""
_MARKS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class SpecialTokens(NamedTuple):
    """What a tokenizer says is special.

    Args:
        ids: All of it: these keep their embeddings.
        marks: Of those, the ones with a role of their own ([CLS], padding and so on), at most
            seven. They are no content that would have to be hidden; others may be.

    Example:
        >>> SpecialTokens.of(tokenizer)
        SpecialTokens(ids=(0, 1, 2, 3), marks=(0, 1, 2, 3))
        >>> SpecialTokens.of(None)  # nothing is special: everything is hidden
        SpecialTokens(ids=(), marks=())
    """

    ids: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()

    @classmethod
    def of(cls, processing_class: Any) -> SpecialTokens:
        """Of a tokenizer, or of a processor that has one."""
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        found = (getattr(tokenizer, f"{mark}_token_id", None) for mark in _MARKS)
        marks: set[int] = {index for index in found if index is not None}
        ids = marks.union(getattr(tokenizer, "all_special_ids", ()))
        return cls(tuple(sorted(ids)), tuple(sorted(marks)))


class Words:
    """Token embeddings `(B, T, H)`. Padding and special tokens keep theirs; noise is embeddings of
    random tokens.

    Args:
        gmap: The batch's map.
        network: The evaluation network, if it does not read every token.
        special: What the tokenizer says is special. Only that counts, never what a network says.

    Raises:
        ValueError: If every token of the batch is padding or special; or if of the rest, more than
            a tenth would not move or is not read by the network.
    """

    def __init__(self, gmap: GradientMap, network: Any, special: SpecialTokens) -> None:
        assert gmap.embedding is not None
        self.embedding, self.ids = gmap.embedding, gmap.domain.main_input(gmap.batch)
        mask = gmap.domain.present(gmap.batch)
        self.mask = None if mask is None else mask.long()
        self.special = special.ids
        present = torch.ones_like(self.ids, dtype=torch.bool) if mask is None else mask
        self.present = present
        words = present & ~_among(self.ids, self.special)
        if not words.any():
            raise ValueError(
                "The batch holds no word: every token is padding or special, so there is nothing "
                "to refine, and its true gradient would be shared. Leave empty texts out of the "
                "data set."
            )
        self.free = words[..., None]
        self.few = int(words.sum()) < FEW_WORDS
        content = present & ~_among(self.ids, special.marks)
        hidden = words & network.reads(gmap.input) if hasattr(network, "reads") else words
        self.movable_share = float(hidden.sum() / content.sum())
        if self.movable_share < LEAST_MOVABLE:
            raise ValueError(
                f"Of the {int(content.sum())} tokens in this batch that are neither padding nor a "
                f"mark such as [CLS], only {self.movable_share:.0%} would be hidden, and at least "
                f"{LEAST_MOVABLE:.0%} must be, so nothing was shared. Words that the tokenizer or "
                "the evaluation network takes for special stay as they are. Give the tokenizer "
                "(processing_class of the Trainer, or `prepare(model, tokenizer)`), leave ordinary "
                "words out of its special tokens, and take a network that was trained with it."
            )

    def noise(self, like: Tensor, generator: Stream) -> Tensor:
        """v: embeddings of tokens drawn uniformly from the vocabulary without the special ones."""
        count = len(self.embedding.weight)  # type: ignore[arg-type]
        ordinary = ordinary_ids(count, self.special).to(like.device)
        drawn = ordinary[generator.integers(len(ordinary), self.ids.shape, device=like.device)]
        return embed(self.embedding, drawn).to(like.dtype)

    def project_(self, x: Tensor) -> None:
        """Embeddings have no range to stay in."""

    def noise_ratio(self, network: Any, x: Tensor) -> Tensor:
        """D of each sample that holds a word, averaged."""
        return network.noise_ratio(x.float(), self.mask).mean()

    def digests(self) -> list[str]:
        """A name for each text, by its tokens."""
        return [_digest(ids[row]) for ids, row in zip(self.ids, self.present, strict=True)]

    def recall_(self, x: Tensor, row: int, remembered: Tensor) -> None:
        x[row, self.present[row]] = remembered.to(x)

    def memory(self, x: Tensor, row: int) -> Tensor:
        return x[row, self.present[row]]


class Pixels:
    """Images `(B, C, H, W)` whose pixels were in [0, 1] before mean and deviation were taken out.
    Noise is uniform. All of an image moves.

    Raises:
        ValueError: If pixels are outside that range.
    """

    def __init__(
        self, gmap: GradientMap, mean: list[float] | None, std: list[float] | None
    ) -> None:
        x = gmap.input
        self.images = x
        self.space = PixelSpace(x, mean, std)
        pixels = self.space.plain(x)
        if pixels.min() < -1e-3 or pixels.max() > 1 + 1e-3:
            raise ValueError(
                f"Pixels range from {float(pixels.min()):.3g} to {float(pixels.max()):.3g}, where "
                "[0, 1] is expected. Give refiner the image processor's image_mean and image_std, "
                "or pass the processor to the Trainer as processing_class."
            )
        self.free = torch.ones_like(x[:, :1], dtype=torch.bool)
        self.few, self.movable_share = False, 1.0

    def noise(self, like: Tensor, generator: Stream) -> Tensor:
        """v: uniform over the pixel range."""
        drawn = generator.uniform(like.shape, device=like.device, dtype=like.dtype)
        return self.space.low + drawn * (self.space.high - self.space.low)

    def project_(self, x: Tensor) -> None:
        self.space.project_(x)

    def noise_ratio(self, network: Any, x: Tensor) -> Tensor:
        return _judged(self.space.plain(x).float(), network)

    def digests(self) -> list[str]:
        """A name for each image, by its pixels."""
        return [_digest(image) for image in self.images]

    def recall_(self, x: Tensor, row: int, remembered: Tensor) -> None:
        x[row] = remembered.to(x)

    def memory(self, x: Tensor, row: int) -> Tensor:
        return x[row]


class SyntheticInput:
    """Input of synthetic samples: all moves but the marks at a text's ends.

    Args:
        made: Their map.
        special: What the tokenizer says is special.
        mean: Of pixels, as for `Pixels`.
        std: Likewise.
    """

    def __init__(
        self,
        made: GradientMap,
        special: SpecialTokens,
        mean: list[float] | None,
        std: list[float] | None,
    ) -> None:
        x, self._space = made.input, None
        if made.embedding is None:
            self.free = torch.ones_like(x[:, :1], dtype=torch.bool)
            self._space = PixelSpace(x, mean, std)
        else:
            self.free = ~_among(made.domain.main_input(made.batch), special.ids)[..., None]

    def noise_ratio(self, network: Any, x: Tensor) -> Tensor:
        """D, averaged over the samples."""
        if self._space is None:
            return network.noise_ratio(x.float(), None).mean()
        return _judged(self._space.plain(x).clamp(0, 1).float(), network)


class Memory:
    """Robust data of examples that were refined before, by their content.

    Args:
        size: How many are kept, the last ones.
    """

    def __init__(self, size: int) -> None:
        self._size, self._known = size, OrderedDict[str, Tensor]()

    def recall_(self, x: Tensor, inputs: Words | Pixels) -> bool:
        """Write what is known of a batch's examples into `x`. Returns whether all are known."""
        known = [self._known.get(key) for key in inputs.digests()] if self._size else []
        for row, last in enumerate(known):
            if last is not None:
                inputs.recall_(x, row, last)
        return bool(known) and all(last is not None for last in known)

    def keep(self, x: Tensor, inputs: Words | Pixels) -> None:
        """The batch's, with room for the last `size`."""
        for row, key in enumerate(inputs.digests() if self._size else []):
            self._known[key] = inputs.memory(x, row).cpu().clone()
            self._known.move_to_end(key)
        while len(self._known) > self._size:
            self._known.popitem(last=False)

    def state_dict(self) -> Tensors:
        """Private to the client."""
        known = enumerate(self._known.items())
        return {f"robust.{index}.{key}": data for index, (key, data) in known}

    def load_state_dict(self, state: Tensors) -> Tensors:
        """Take what is the memory's. Returns the rest."""
        own = [key for key in state if key.startswith("robust.")]
        own.sort(key=lambda key: int(key.split(".")[1]))
        self._known = OrderedDict((key.split(".")[2], state[key].cpu()) for key in own)
        return {key: tensor for key, tensor in state.items() if key not in own}


def _judged(pixels: Tensor, network: Any) -> Tensor:
    if isinstance(network, ImageEvaluationNetwork):  # of any size
        return judge_images(pixels, network).mean()
    ratio: Tensor = network.noise_ratio(pixels).mean()
    return ratio


def check_embeddings_stay(gmap: GradientMap) -> None:
    """Refuse to share token embeddings."""
    weight = None if gmap.embedding is None else gmap.embedding.weight
    if weight is not None and any(p is weight for p in gmap.parameters.values()):
        raise ValueError(
            "refiner never shares the token embeddings: their gradient names the words, and "
            "training them changes the space that an evaluation network knows. Leave "
            "share_input_embeddings at False."
        )


def try_on_batch(gmap: GradientMap, network: Any, inputs: Words | Pixels) -> None:
    """See that D rises from a client's own data to noise, and can be raised in between.

    Draws from a stream of its own: a resumed run, which tries again, shares what it would have.

    Raises:
        ValueError: If not, with the figures. Networks of a class of one's own are not tried.
    """
    if not isinstance(network, EvaluationNetworkBase):
        return
    x, noise = gmap.input, inputs.noise(gmap.input, Stream())
    half, whole = (
        torch.where(inputs.free, torch.lerp(x, noise, share), x).detach() for share in (0.5, 1.0)
    )
    ratios = [inputs.noise_ratio(network, at) for at in (x, half.requires_grad_(), whole)]
    check_order(network, [float(r.detach()) for r in ratios], 0.0 if inputs.few else LEAST_GAP)
    (slope,) = gmap.input_gradient(ratios[1], half)
    check_slope(network, slope * inputs.free)


def _among(ids: Tensor, listed: Sequence[int]) -> Tensor:
    return torch.isin(ids, torch.tensor(list(listed), dtype=ids.dtype, device=ids.device))


def _digest(content: Tensor) -> str:
    return hashlib.blake2b(
        content.detach().cpu().contiguous().numpy().tobytes(), digest_size=16
    ).hexdigest()
