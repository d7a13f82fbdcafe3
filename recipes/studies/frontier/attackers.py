"""What attackers who know the defense read of a client at a stage of its training."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Attack, Observation, make_attack
from hf_gradguard.attacks.uploads import gathered
from hf_gradguard.defenses import Defense, Message
from hf_gradguard.metrics import score_candidates, score_text
from hf_gradguard.randomness import Stream

from ..lib.attacks import ids_found
from ..lib.device import DEVICE, there
from .client import Stage
from .settings import GATHERED, WORD

NOISE_ALONE = "noise_alone"
OWN, OTHERS = "token_f1", "token_f1_others"  # words of the sentence found, and by chance
CHANCE = "noise alone"  # the row of what an attacker makes of it


def attacked(
    cell: dict, stage: Stage, tokenizer, texts: list[dict], later: Iterable[dict] = ()
) -> dict:
    """Figures of each sentence: token F1, with itself and with others; of candidates, whether it is
    told at 1 % false alarms, and its rank, or the same of the word in its middle. With
    `NOISE_ALONE` among a cell's settings there is nothing to find. Who gathers what a client sends
    waits for the batches to come `later`.
    """
    if NOISE_ALONE in cell:
        stage = noise_alone(stage, tokenizer)
    if cell["attack"] == "candidates":
        return _told(cell, texts, observed(cell, stage, tokenizer, texts))
    if cell["attack"] == WORD[0]:
        return _words_told(cell, stage, tokenizer, texts)
    batches = _batches(cell, tokenizer, texts)
    if cell["attack"] == GATHERED[0]:
        see = functools.partial(_granted, stage, tokenizer)
        return _told(cell, texts, waited_for(cell, stage, batches, later, see))
    messages, found = sent(cell, stage, batches), []
    for number, (batch, message) in enumerate(zip(batches, messages, strict=True)):
        if says_nothing(message):
            found.append([[] for _ in range(cell["size"])])
            continue
        seen, known = _observed(stage, batch, message, tokenizer)
        attack = make_attack(cell["attack"], **cell["settings"] | known.get(cell["attack"], {}))
        found.append(ids_found(attack, seen, number))
    truths = [
        [
            ids[mask.bool()].tolist()
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        for batch in batches
    ]
    return words_of(found, truths, tokenizer)


def noise_alone(stage: Stage, processing_class: Any = None) -> Stage:
    """The same model, and messages that say nothing."""
    defense = make_defense("gaussian_noise", relative_scale=1e6)
    defense.prepare(stage.model, processing_class)
    return stage._replace(defense=defense)


def words_of(found: list, truths: list, tokenizer) -> dict[str, list[float]]:
    """Token F1 of each sentence with its own message's; and the mean with the other messages', of
    which nothing was to be seen: so much is common to sentences.
    """

    def scored(others: list) -> np.ndarray:
        scores = score_text(found, others, tokenizer=tokenizer, bootstrap=0)
        return np.asarray(scores.per_sample["token_f1"], dtype=float)

    figures = {OWN: scored(truths)}
    turns = [truths[turn:] + truths[:turn] for turn in range(1, len(truths))]
    if turns:
        figures[OTHERS] = np.mean([scored(turned) for turned in turns], axis=0)
    return {name: [round(float(f), 4) for f in values] for name, values in figures.items()}


def _batches(cell: dict, tokenizer, texts: list[dict]) -> list[dict]:
    """A cell's messages, of texts one after the other."""
    size, batches = cell["size"], []
    for number in range(cell["messages"]):
        part = texts[number * size : (number + 1) * size]
        batch = dict(tokenizer([t["sentence"] for t in part], padding=True, return_tensors="pt"))
        batches.append(there(batch | {"labels": torch.tensor([t["label"] for t in part])}))
    return batches


def observed(cell: dict, stage: Stage, tokenizer, texts: list[dict]) -> list[Observation | None]:
    """A cell's messages, with labels and the defense's mechanism; `None` of one of zeros."""
    batches = _batches(cell, tokenizer, texts)
    messages = sent(cell, stage, batches)
    return [
        None if says_nothing(message) else _granted(stage, tokenizer, batch, message)
        for batch, message in zip(batches, messages, strict=True)
    ]


def says_nothing(message: Message) -> bool:
    """Whether all is zero: Refiner's samples may span nothing of a small gradient."""
    return not any(tensor.any() for tensor in message.values())


def of_each(
    attack: Attack, seen: Sequence[Observation | None], generator: torch.Generator
) -> list[Any]:
    """What an attack makes of messages together; `None` of one of zeros."""
    there = [one for one in seen if one is not None]
    found = iter(attack.together(there, generator) if there else ())
    return [None if one is None else next(found) for one in seen]


def sent(cell: dict, stage: Stage, batches: Sequence[dict]) -> list[Message]:
    """What the client makes of batches, each the next one of its training."""
    made = []
    for number, batch in enumerate(batches):
        with _as_it_was(stage.defense):
            made.append(_message(stage, batch, Stream.from_seeds(cell["seed"], number)))
    return made


def _message(stage: Stage, batch: dict, stream: Stream) -> Message:
    return stage.defense(GradientMap(stage.model, batch), stream)


@contextmanager
def _as_it_was(defense: Defense) -> Iterator[None]:
    """Leaves a defense as it was before."""
    state = {name: tensor.clone() for name, tensor in defense.state_dict().items()}
    yield
    defense.load_state_dict(state)


def _granted(stage: Stage, tokenizer, batch: dict, message: Message) -> Observation:
    """A message, its labels, and the mechanism of the defense."""
    return Observation(
        stage.model, dict(message), tuple(batch["input_ids"].shape), labels=batch["labels"],
        tokenizer=tokenizer, mechanism=stage.defense.mechanism(message),
    )  # fmt: skip


def waited_for(
    cell: dict,
    stage: Stage,
    batches: Sequence[dict],
    later: Iterable[dict],
    see: Callable[[dict, Message], Observation],
) -> list[Observation]:
    """What somebody has of each batch who waits for some that come later."""
    sequel = list(itertools.islice(later, cell["settings"]["later"]))

    def uploads(number: int, batch: dict) -> Iterator[Observation]:
        with _as_it_was(stage.defense):
            first = see(batch, _message(stage, batch, Stream.from_seeds(cell["seed"], number)))
            known = first.mechanism and replace(
                first.mechanism, batches=stage.batches, has_residual=True
            )
            yield first if stage.batches is None else replace(first, mechanism=known)
            for place, following in enumerate(sequel):
                stream = Stream.from_seeds(cell["seed"], number, place)
                yield see(following, _message(stage, following, stream))

    return [gathered(uploads(number, batch)) for number, batch in enumerate(batches)]


def _told(cell: dict, texts: list[dict], seen: Sequence[Observation | None]) -> dict:
    """Each message's sentences among a list of all messages' and more, with their labels."""
    listed = texts[: cell["settings"]["listed"]]
    candidates = [one["sentence"] for one in listed], [one["label"] for one in listed]
    return told(cell, *candidates, seen)


def _words_told(cell: dict, stage: Stage, tokenizer, texts: list[dict]) -> dict:
    """The word in the middle of each sentence among others' words, for who knows all the rest."""
    sentences = [tokenizer(text["sentence"])["input_ids"] for text in texts]
    every = {i for ids in sentences for i in ids} - set(tokenizer.all_special_ids)
    count, found = min(cell["settings"]["words"], len(every)), list[Any]()
    for number, seen in enumerate(observed(cell, stage, tokenizer, texts)):
        ids = sentences[number]
        place = len(ids) // 2
        others = np.random.default_rng(number).permutation(sorted(every - {ids[place]}))
        words = [ids[place], *others[: count - 1].tolist()]
        attack = make_attack("candidates", candidates=ids, places=[place], words=words)
        found += of_each(attack, [seen], torch.Generator(DEVICE).manual_seed(0))
    return _scored(found, [[0]] * len(found), count)


def told(
    cell: dict, listed: Sequence, labels: Sequence[int], seen: Sequence[Observation | None]
) -> dict:
    """Members of messages among a list that starts with them: whether each is told at 1 % false
    alarms, and its rank. A message of zeros says the same of all.
    """
    attack, size = make_attack("candidates", candidates=listed, labels=labels), cell["size"]
    found = of_each(attack, seen, torch.Generator(DEVICE).manual_seed(0))
    members = [range(size * number, size * (number + 1)) for number in range(len(seen))]
    return _scored(found, members, len(listed))


def _scored(found: list[Any], members: Sequence[Sequence[int]], count: int) -> dict:
    """Of so many candidates for each message; one of zeros says the same of all."""
    alike = np.zeros(count)
    scores = [alike if one is None else one.scores.cpu().numpy() for one in found]
    figures = score_candidates(scores, members, bootstrap=0).per_sample
    return {name: [float(x) for x in figures[name]] for name in ("tpr_1%", "rank")}


def _observed(stage: Stage, batch: dict, message, tokenizer) -> tuple:
    """What a server that knows the defense has, and how it sets its attacks."""
    noise = message.noise
    seen = Observation(
        model=stage.model,
        gradient=message,
        input_shape=tuple(batch["input_ids"].shape),
        labels=batch["labels"],
        attention_mask=batch["attention_mask"],
        tokenizer=tokenizer,
        noise_variance=None if noise is None else noise.added,
    )
    known = {"span": {"complete": True}, "tag": {"match_nonzero": True}} if message.exact else {}
    return seen, known if message.transmitted is not None else {}
