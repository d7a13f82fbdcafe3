"""What attackers that know the defense recover from a client at a stage of its training."""

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
from hf_gradguard.attacks.uploads import accumulate_uploads
from hf_gradguard.defenses import Defense, Message
from hf_gradguard.metrics import score_candidates, score_images, score_text
from hf_gradguard.randomness import Stream

from .frontier_clients import ImageTask, Stage
from .frontier_rows import ACCUMULATED, CANDIDATES, INVERTING, UNAWARE, UNLABELED, WORD
from .lib.attacks import attack_of, token_ids_of
from .lib.attacks import observe as observe_message
from .lib.defenses import with_own_strength
from .lib.device import DEVICE, on_device
from .lib.images import INVERTING as INVERTING_SETTINGS
from .lib.images import single_images, smoothed
from .lib.text import batch_of

NOISE_ALONE = "noise_alone"
F1, F1_OTHERS = "token_f1", "token_f1_others"  # words of the sentence found, and by chance
CHANCE = "noise alone"  # the row of what an attacker makes of it
GRAY = "a gray image"
Observations = Sequence[Observation | None]  # `None` of a message of zeros


def attack_texts(
    cell: dict, stage: Stage, tokenizer, texts: list[dict], later_batches: Iterable[dict] = ()
) -> dict:
    """Metrics of each sentence: token F1, with itself and with others; of candidates, whether it is
    a true positive at 1 % FPR, and its rank, or the same of the word in its middle. With
    `NOISE_ALONE` among a cell's settings there is nothing to find. The attacker that accumulates
    waits for the `later` batches.
    """
    if NOISE_ALONE in cell:
        stage = noise_alone(stage, tokenizer)
    if cell["attack"] == CANDIDATES[0]:
        return rank_texts(cell, texts, observe_texts(cell, stage, tokenizer, texts))
    if cell["attack"] == WORD[0]:
        return rank_words(cell, stage, tokenizer, texts)
    batches = batches_of(cell, tokenizer, texts)
    see = functools.partial(observe, stage, tokenizer=tokenizer)
    if cell["attack"] == ACCUMULATED[0]:
        return rank_texts(cell, texts, accumulate(cell, stage, batches, later_batches, see))
    recovered = []
    for number, (batch, message) in enumerate(
        zip(batches, messages_of(cell, stage, batches), strict=True)
    ):
        if says_nothing(message):
            recovered.append([[] for _ in range(cell["size"])])
            continue
        knowledge = {}
        if message.exact:
            knowledge = {"span": {"complete": True}, "tag": {"match_nonzero": True}}
        settings = knowledge.get(cell["attack"], {}) if message.transmitted is not None else {}
        attack = make_attack(cell["attack"], **cell["settings"] | settings)
        observation = replace(
            see(batch, message), mechanism=None, attention_mask=batch["attention_mask"],
            noise_variance=None if message.noise is None else message.noise.added,
        )  # fmt: skip
        recovered.append(token_ids_of(attack, observation, number))
    truth = [
        [
            ids[mask.bool()].tolist()
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        for batch in batches
    ]
    return f1_of(recovered, truth, tokenizer)


def noise_alone(stage: Stage, processing_class: Any = None) -> Stage:
    """The same model, and messages that say nothing."""
    defense = make_defense("gaussian_noise", relative_scale=1e6, strength="own")
    defense.prepare(stage.model, processing_class)
    return stage._replace(defense=defense)


def f1_of(recovered: list, truth: list, tokenizer) -> dict[str, list[float]]:
    """Token F1 of each sentence with its own message's; and the mean with the other messages', of
    which nothing was to be seen: so much is common to sentences.
    """

    def scored(texts: list) -> np.ndarray:
        scores = score_text(recovered, texts, tokenizer=tokenizer, bootstrap=0)
        return np.asarray(scores.per_sample["token_f1"], dtype=float)

    metrics = {F1: scored(truth)}
    turns = [truth[turn:] + truth[:turn] for turn in range(1, len(truth))]
    if turns:
        metrics[F1_OTHERS] = np.mean([scored(texts) for texts in turns], axis=0)
    return {name: [round(float(f), 4) for f in values] for name, values in metrics.items()}


def batches_of(cell: dict, tokenizer, texts: list[dict]) -> list[dict]:
    """A cell's messages, of texts one after the other."""
    size = cell["size"]
    groups = [texts[size * number : size * (number + 1)] for number in range(cell["messages"])]
    return [on_device(batch_of(tokenizer, group)) for group in groups]


def observe_texts(cell: dict, stage: Stage, tokenizer, texts: list[dict]) -> Observations:
    """A cell's messages, with labels and the defense's mechanism."""
    see = functools.partial(observe, stage, tokenizer=tokenizer)
    return observe_all(cell, stage, batches_of(cell, tokenizer, texts), see)


def observe_all(
    cell: dict, stage: Stage, batches: Sequence[dict], see: Callable[..., Observation]
) -> Observations:
    messages = messages_of(cell, stage, batches)
    return [
        None if says_nothing(message) else see(batch, message)
        for batch, message in zip(batches, messages, strict=True)
    ]


def says_nothing(message: Message) -> bool:
    """Whether all is zero: Refiner's samples may span nothing of a small gradient."""
    return not any(tensor.any() for tensor in message.values())


def attack_each(attack: Attack, observations: Observations, generator: torch.Generator) -> list:
    """What an attack makes of messages together."""
    telling = [observation for observation in observations if observation is not None]
    results = iter(attack.reconstruct_many(telling, generator) if telling else ())
    return [None if observation is None else next(results) for observation in observations]


def messages_of(cell: dict, stage: Stage, batches: Sequence[dict]) -> list[Message]:
    """What the client makes of batches, each the next one of its training."""
    messages = []
    for number, batch in enumerate(batches):
        with _restored(stage.defense):
            messages.append(message_of(stage, batch, cell["seed"], number))
    return messages


def message_of(stage: Stage, batch: dict, *seeds: int) -> Message:
    message: Message = stage.defense(GradientMap(stage.model, batch), Stream.from_seeds(*seeds))
    return message


@contextmanager
def _restored(defense: Defense) -> Iterator[None]:
    """Leaves a defense as it was before."""
    state = {name: tensor.clone() for name, tensor in defense.state_dict().items()}
    yield
    defense.load_state_dict(state)


def observe(stage: Stage, batch: dict, message: Message, **grants: Any) -> Observation:
    """A message, its labels, and the mechanism of the defense."""
    mechanism = stage.defense.mechanism(message)
    return observe_message(stage.model, batch, message, mechanism=mechanism, **grants)


def observe_image(stage: Stage, batch: dict, message: Message) -> Observation:
    noise = message.noise
    return observe(stage, batch, message, noise_variance=None if noise is None else noise.added)


def accumulate(
    cell: dict, stage: Stage, batches: Sequence[dict], later_batches: Iterable[dict],
    see: Callable[..., Observation],
) -> list[Observation]:  # fmt: skip
    """What an attacker has of each batch that waits for later messages."""
    sequel = list(itertools.islice(later_batches, cell["settings"]["later"]))

    def uploads(number: int, batch: dict) -> Iterator[Observation]:
        with _restored(stage.defense):
            own_message = see(batch, message_of(stage, batch, cell["seed"], number))
            mechanism = own_message.mechanism and replace(
                own_message.mechanism, batches=stage.batches, has_residual=True
            )
            yield (
                own_message if stage.batches is None else replace(own_message, mechanism=mechanism)
            )
            for place, following in enumerate(sequel):
                yield see(following, message_of(stage, following, cell["seed"], number, place))

    return [accumulate_uploads(uploads(number, batch)) for number, batch in enumerate(batches)]


def rank_texts(cell: dict, texts: list[dict], observations: Observations) -> dict:
    """Each message's sentences among a list of all messages' and more, with their labels."""
    candidates = texts[: cell["settings"]["listed"]]
    return rank_members(cell, *sentences_and_labels(candidates), observations)


def sentences_and_labels(texts: list[dict]) -> tuple[list[str], list[int]]:
    return [text["sentence"] for text in texts], [text["label"] for text in texts]


def rank_words(cell: dict, stage: Stage, tokenizer, texts: list[dict]) -> dict:
    """The word in the middle of each sentence among others' words, where all the rest is known."""
    sentences = [tokenizer(text["sentence"])["input_ids"] for text in texts]
    vocabulary = {i for ids in sentences for i in ids} - set(tokenizer.all_special_ids)
    count, results = min(cell["settings"]["words"], len(vocabulary)), list[Any]()
    for number, observation in enumerate(observe_texts(cell, stage, tokenizer, texts)):
        ids = sentences[number]
        place = len(ids) // 2
        other_words = np.random.default_rng(number).permutation(sorted(vocabulary - {ids[place]}))
        words = [ids[place], *other_words[: count - 1].tolist()]
        attack = make_attack("candidates", candidates=ids, places=[place], words=words)
        results += attack_each(attack, [observation], torch.Generator(DEVICE).manual_seed(0))
    return ranking_of(results, [[0]] * len(results), count)


def rank_members(
    cell: dict, candidates: Sequence, labels: Sequence[int], observations: Observations
) -> dict:
    """Members of messages among candidates that start with them: whether each is a true positive at
    1 % FPR, and its rank. A message of zeros says the same of all.
    """
    attack, size = make_attack("candidates", candidates=candidates, labels=labels), cell["size"]
    results = attack_each(attack, observations, torch.Generator(DEVICE).manual_seed(0))
    members = [range(size * number, size * (number + 1)) for number in range(len(observations))]
    return ranking_of(results, members, len(candidates))


def ranking_of(results: list[Any], members: Sequence[Sequence[int]], count: int) -> dict:
    """Of so many candidates for each message."""
    equal_scores = np.zeros(count)
    scores = [equal_scores if result is None else result.scores.cpu().numpy() for result in results]
    metrics = score_candidates(scores, members, bootstrap=0).per_sample
    return {name: [float(x) for x in metrics[name]] for name in ("tpr_1%", "rank")}


def attack_images(cell: dict, task: ImageTask, path: str) -> dict:
    """Metrics of each image: PSNR in dB; of candidates, whether it is a true positive at 1 % FPR,
    and its rank.
    """
    count = cell["messages"]
    if cell["attack"] == GRAY:
        rows = images_of(path, count)
        return psnr_of([torch.full_like(row["pixel_values"], 0.5) for row in rows], rows)
    stage = task.stage(cell, cell["stage"])
    if NOISE_ALONE in cell:
        stage = noise_alone(stage)
    if cell["attack"] in (CANDIDATES[0], UNLABELED[0], ACCUMULATED[0]):
        return rank_images(cell, stage, task, path)
    settings = dict(cell["settings"])
    own_count = settings.pop("own")
    rows = images_of(path, count + own_count)
    images = [row["pixel_values"] for row in rows]
    gray = torch.full_like(images[0], 0.5)
    settings = INVERTING_SETTINGS | {"patience": 5, "start": gray} | settings
    settings["match_nonzero"] = stage.defense.informed().get("match_nonzero", False)
    attackers_stage = stage._replace(defense=attackers_defense(cell, stage, task))
    attackers_own = observe_images(cell, attackers_stage, rows[count:])
    if all(observation is not None for observation in attackers_own):
        settings = smoothed(settings, attackers_own, images[count:])
    else:  # there is nothing to choose a weight by
        settings |= {"total_variation": settings["total_variation"][0]}
    observations = observe_images(cell, stage, rows[:count])
    attack = attack_of(INVERTING[0], **settings)
    generator = torch.Generator(DEVICE).manual_seed(cell["seed"])
    results = attack_each(attack, observations, generator)
    guesses = [gray if result is None else result.input.nan_to_num(0.5) for result in results]
    weight = {"total_variation": settings["total_variation"]}
    return psnr_of(guesses, rows[:count]) | weight


def rank_images(cell: dict, stage: Stage, task: ImageTask, path: str) -> dict:
    rows, size = images_of(path, cell["settings"]["listed"]), cell["size"]
    groups = [rows[start : start + size] for start in range(0, cell["messages"] * size, size)]
    batches = [{key: torch.cat([row[key] for row in group]) for key in rows[0]} for group in groups]
    if cell["attack"] == ACCUMULATED[0]:
        see = functools.partial(observe_image, stage)
        observations: Observations = accumulate(cell, stage, batches, task.later_batches(), see)
    else:
        observations = observe_images(cell, stage, batches)
    if cell["attack"] == UNLABELED[0]:
        observations = [o and replace(o, labels=None) for o in observations]
    candidates = [row["pixel_values"][0] for row in rows]
    return rank_members(cell, candidates, [int(row["labels"]) for row in rows], observations)


def attackers_defense(cell: dict, stage: Stage, task: ImageTask) -> Defense:
    """An attacker's: with feedback after messages of its own, so that something is left out; at the
    start after those that are empty.
    """
    defense = make_defense(cell["defense"], **with_own_strength(cell["strength"]))
    defense.prepare(stage.model, None)
    if getattr(defense, "error_feedback", False):
        warmup = defense.facts.warmup_messages if cell["stage"] == "start" else None
        for number, batch in enumerate(itertools.islice(task.later_batches(), warmup)):
            defense(GradientMap(stage.model, batch), Stream.from_seeds(cell["seed"], number))
    return defense


def observe_images(cell: dict, stage: Stage, batches: list[dict]) -> Observations:
    """What a server that knows the defense has."""
    observations = observe_all(cell, stage, batches, functools.partial(observe_image, stage))
    if cell["attack"] != UNAWARE[0]:
        return observations
    return [o and replace(o, noise_variance=None, mechanism=None) for o in observations]


def images_of(path: str, count: int) -> list[dict]:
    return [on_device(row) for row in single_images(path, count)]


def psnr_of(guesses: list, rows: list[dict]) -> dict:
    images = [row["pixel_values"] for row in rows]
    psnr = score_images(guesses, images, bootstrap=0).per_sample["psnr"]
    return {"psnr": [round(float(value), 2) for value in psnr]}
