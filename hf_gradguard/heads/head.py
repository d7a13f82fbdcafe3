"""Linear heads on features of a frozen encoder, as models of Transformers.

Only the head is trained, and shared. Every sample has norm 1, and a constant is one of the
features: a bias beside them would be half of every clipped gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from accelerate.utils import broadcast
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    default_data_collator,
)
from transformers import initialization as init
from transformers.modeling_outputs import (
    ImageClassifierOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import logging

from ..gradient_map.domain import IGNORED
from ..models import ModelError, explain_missing_model
from ..training.exchange.start import check_agreed
from .arguments import training_arguments
from .configuration import PrivateHeadConfig
from .features import layer_features, pair_features, token_features
from .processing import load_processing_class, processed
from .rows import BATCH, prepared

logger = logging.get_logger(__name__)

MOST_DIRECTIONS = 1400
_ENCODER = "encoder."
_CARD = """## Model

- Encoder: {encoder}. It was frozen, and {place}.
- Trained: a linear head of {count} numbers, on {directions} directions of the encoder's features
- Public data, by which the directions were found: {public}

```python
import hf_gradguard.heads  # tells Transformers of such models
from transformers import pipeline

pipeline("{task}", model="...")
```"""
_TOKENS = 3  # of each public text, by which directions of tokens are found


def directions_for(num_rows: int) -> int:
    """Return how many directions so many private rows can tell from noise: one for every 16.

    Args:
        num_rows: The number of private rows.

    Example:
        >>> directions_for(8), directions_for(3200), directions_for(67_000)
        (2, 200, 1400)
    """
    return min(MOST_DIRECTIONS, max(2, num_rows // 16))


def warn_of_few(directions: int, wanted: int) -> None:
    """Warn where public samples differ in fewer directions than private rows can tell apart.

    Args:
        directions: The number of directions that there are.
        wanted: The number of directions that are wanted.
    """
    if directions < wanted:
        logger.warning(
            f"The public samples differ in {directions} directions, fewer than the {wanted} that "
            "are wanted: a head learns more with thousands of them."
        )


def collate_tokens(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return a batch of texts' tokens, filled up to the longest.

    Args:
        rows: The `features` `(T, directions + 1)` and `labels` `(T,)` of each text.

    Example:
        >>> rows = [{"features": torch.ones(2, 4), "labels": torch.ones(2)}]
        >>> rows += [{"features": torch.ones(1, 4), "labels": torch.ones(1)}]
        >>> collate_tokens(rows)["labels"]
        tensor([[   1,    1],
                [   1, -100]])
    """
    features = [torch.as_tensor(row["features"]) for row in rows]
    batch = {
        "features": pad_sequence(features, batch_first=True),
        "attention_mask": pad_sequence(
            [torch.ones(len(entries), dtype=torch.long) for entries in features], batch_first=True
        ),
    }
    if "labels" in rows[0]:
        labels = [torch.as_tensor(row["labels"]).long() for row in rows]
        batch["labels"] = pad_sequence(labels, batch_first=True, padding_value=IGNORED)
    return batch


class PrivateHead(PreTrainedModel):
    """A linear head on public directions of a frozen encoder's features and a constant.

    This is the base of one class for each task. `private_head` makes them. Only `head` is
    trained, and it starts at zero, so nothing in a new one depends on private data.

    Args:
        config: The configuration.
        encoder: A model of Transformers that takes texts or images, or any other module, whose
            features are what it returns. Default: the one that the configuration describes, at
            random, if `save_encoder` is set; `from_pretrained` loads its weights.
        processing_class: The tokenizer or image processor, which is saved with the head. Default:
            the one of the folder or name that the head or its encoder is loaded from.

    Raises:
        ValueError: If the configuration is of another task.

    Attributes:
        task: The task's name on the Hub.
        encoder: The encoder, which stays as it is; `None` without one.
        directions: The map from features to directions, before samples get norm 1.
        head: The map from directions and the constant to scores.

    Example:
        >>> from hf_gradguard.heads import private_head
        >>> head = private_head(nn.Identity(), torch.randn(9, 4), num_labels=3, directions=2)
        >>> isinstance(head, PrivateHead), head.features_of(torch.randn(5, 4)).shape
        (True, torch.Size([5, 3]))
    """

    config_class = PrivateHeadConfig
    config: PrivateHeadConfig
    base_model_prefix = ""
    main_input_name = "features"
    accepts_loss_kwargs = False
    task = "text-classification"
    takes_images = reads_words = False
    encoder: nn.Module | None
    _keys_to_ignore_on_load_missing = (r"encoder\.pooler\.",)  # no feature reads it
    data_collator = staticmethod(default_data_collator)
    """What a Trainer makes batches of rows of `prepare_dataset` by."""
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True  # the encoder's own matter

    def __init__(
        self,
        config: PrivateHeadConfig,
        encoder: nn.Module | None = None,
        processing_class: Any = None,
    ) -> None:
        if config.task != self.task:
            raise ValueError(
                f"This head is for {config.task}, and {type(self).__name__} for {self.task}. Load "
                "it by the Auto class of its task."
            )
        super().__init__(config)
        self.directions = nn.Linear(config.num_features, config.directions)
        self.head = nn.Linear(config.directions + 1, config.num_labels, bias=False)
        self.encoder = None
        if encoder is None and config.save_encoder and config.encoder_config is not None:
            self.encoder = new_encoder(config)
        self.post_init()
        self._processing_class = processing_class
        self._can_cut = False
        self.attach_encoder(self.encoder if encoder is None else encoder)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, encoder: Any = None, **kwargs: Any
    ) -> Any:
        """Load a head, and its encoder from the same place or from where it comes from.

        Args:
            pretrained_model_name_or_path: The folder that `save_pretrained` wrote, or a name on
                the Hub.
            *args: All other arguments of `PreTrainedModel.from_pretrained`.
            encoder: An encoder that is loaded already; needed where it is no model of Transformers.
            **kwargs: All keyword arguments of `PreTrainedModel.from_pretrained`. No code is run
                that comes with a model.

        Raises:
            FileNotFoundError: If the encoder is kept by its name, and there is none of that name.

        Example:
            >>> from hf_gradguard.heads import private_head
            >>> head = private_head(model, public_texts, num_labels=2, processing_class=tokenizer)
            >>> head.save_pretrained("head")
            >>> type(head).from_pretrained("head").head
            Linear(in_features=16, out_features=2, bias=False)
        """
        kwargs.pop("trust_remote_code", None)
        loaded = super().from_pretrained(
            pretrained_model_name_or_path, *args, trust_remote_code=False, **kwargs
        )
        head: PrivateHead = loaded[0] if isinstance(loaded, tuple) else loaded
        config = head.config
        if encoder is None and head.encoder is None and config.encoder_config is not None:
            encoder = load_encoder(config.encoder, config.encoder_revision)
            encoder.to(head.device, head.dtype)
        head.attach_encoder(head.encoder if encoder is None else encoder)
        return loaded

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save the head, its directions, its tokenizer or image processor, and the encoder.

        Of the encoder the name alone is saved if `config.save_encoder` is not set.

        Args:
            save_directory: The folder.
            *args: All other arguments of `PreTrainedModel.save_pretrained`.
            **kwargs: All keyword arguments of `PreTrainedModel.save_pretrained`. `push_to_hub=True`
                uploads the head.
        """
        self._leave_out_encoder()
        processing_class = self.processing_class
        if processing_class is not None and kwargs.get("is_main_process", True):
            processing_class.save_pretrained(save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)

    def _leave_out_encoder(self) -> None:
        """Let neither files nor checkpoints have weights that are kept by the encoder's name."""
        names = [name for name in self.state_dict() if name.startswith(_ENCODER)]
        is_saved = self.config.save_encoder and self.config.encoder_config is not None
        self._keys_to_ignore_on_save = set() if is_saved else set(names)

    def attach_encoder(self, encoder: nn.Module | None) -> None:
        """Set the encoder, and freeze all but the head.

        Args:
            encoder: The encoder, or `None`, for a head that is given features.
        """
        self.encoder = encoder
        if isinstance(encoder, PreTrainedModel):
            tied = getattr(encoder, "all_tied_weights_keys", None) or {}
            tied = {f"{_ENCODER}{name}": f"{_ENCODER}{source}" for name, source in tied.items()}
            self.all_tied_weights_keys: dict[str, str] = {**self.all_tied_weights_keys, **tied}
        self.requires_grad_(False)
        self.head.requires_grad_(True)
        self.train(self.training)
        self._leave_out_encoder()

    def set_directions(self, directions: nn.Linear, is_chosen: bool = True) -> None:
        """Set the map from features to directions, and begin anew with a head that is zero.

        Args:
            directions: The map, the directions of largest variance first.
            is_chosen: Whether their number is settled. Otherwise `fit_directions` may cut it.
        """
        device, dtype = self.head.weight.device, self.head.weight.dtype
        self.directions = directions.to(device, dtype)
        self.config.num_features = directions.in_features
        self.config.directions = directions.out_features
        self.head = nn.Linear(
            directions.out_features + 1, self.config.num_labels, False, device, dtype
        )
        nn.init.zeros_(self.head.weight)
        self._can_cut = not is_chosen
        self.attach_encoder(self.encoder)

    def fit_directions(self, num_rows: int) -> None:
        """Cut the directions to one for every 16 rows, which many rows can tell from noise.

        A head whose number of directions was given, or that is trained already, stays as it is.

        Args:
            num_rows: The number of private rows that it will be trained on.
        """
        count = directions_for(num_rows)
        if not self._can_cut or bool(self.head.weight.any()):
            return
        self._can_cut = False
        warn_of_few(self.config.directions, count)
        if count < self.config.directions:
            fewer = nn.Linear(self.config.num_features, count)
            with torch.no_grad():
                fewer.weight.copy_(self.directions.weight[:count])
                fewer.bias.copy_(self.directions.bias[:count])
            self.set_directions(fewer)

    def train(self, mode: bool = True) -> Self:
        """Keep the encoder in eval mode: no dropout, and no statistics of a batch.

        Args:
            mode: Whether the rest is in training mode.
        """
        super().train(mode)
        if self.encoder is not None:
            self.encoder.eval()
        return self

    def get_input_embeddings(self) -> nn.Module:
        """Return the encoder's input embeddings."""
        if not isinstance(self.encoder, PreTrainedModel):
            raise NotImplementedError("The head's encoder is no model of Transformers.")
        return self.encoder.get_input_embeddings()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.zeros_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)

    @property
    def processing_class(self) -> Any:
        """The tokenizer or image processor; `None` if there is no place to load it from."""
        place = self.config.name_or_path or self.config.encoder
        if self._processing_class is None and self.config.encoder_config is not None and place:
            self._processing_class = load_processing_class(place, self.takes_images)
        return self._processing_class

    # --- training

    def training_arguments(self, output_dir: str, *, num_rows: int, **settings: Any) -> Any:
        """Return arguments of a training by `dp_sgd` per sample, with noise that is correlated.

        They take no search: see `heads.arguments.training_arguments`, which has all settings. A
        head whose number of directions was left open gets one for every 16 rows. If there are
        several ranks, all of them must call it, and take rank 0's directions.

        Args:
            output_dir: The folder of the model.
            num_rows: The number of rows of the training data, of all ranks.
            **settings: Any argument of `GradGuardConfig`, and any setting of `dp_sgd`, by name:
                `noise_multiplier=1.5` or `target_epsilon=3.0`, `sampling="balls_in_bins"`, ...

        Returns:
            A `GradGuardConfig`.

        Example:
            >>> from hf_gradguard.heads import private_head
            >>> head = private_head(model, public_texts, num_labels=2, processing_class=tokenizer)
            >>> args = head.training_arguments("out", num_rows=3200, use_cpu=True)
            >>> args.defense_kwargs["noise_multiplier"], round(args.learning_rate)
            (1.5, 28)
        """
        self.fit_directions(num_rows)
        args = training_arguments(output_dir, num_rows, **settings)
        if args.world_size > 1:
            self._take_directions(args.device)
        return args

    def _take_directions(self, device: torch.device) -> None:
        """Take rank 0's directions: on another machine they may have other signs."""
        tensors = [self.directions.weight.detach(), self.directions.bias.detach()]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        check_agreed({"the sizes of the head's directions": shapes}, device)
        for tensor in tensors:
            sent = tensor.to(device)
            broadcast(sent)
            tensor.copy_(sent)

    def prepare_dataset(self, dataset: Any, processing_class: Any = None) -> Any:
        """Return rows of `features` and `labels`, made of rows of texts or images.

        Rows that have `features` stay as they are. Features are made once, and kept on this
        machine alone under a key of everything that decides them; see `heads.rows`.

        Args:
            dataset: A `datasets.Dataset`, a list of rows, or any data set with a length.
            processing_class: The tokenizer or image processor, which is the head's own from then
                on. Default: the one that it has.

        Returns:
            A `datasets.Dataset`.

        Raises:
            ValueError: If no column has texts, images or features.
        """
        if processing_class is not None:
            self._processing_class = processing_class
        return prepared(self, dataset)

    def describe_for_card(self) -> str:
        """Return a section of a model's card: what was trained, on what, and how it is loaded.

        Example:
            >>> from hf_gradguard.heads import private_head
            >>> head = private_head(model, public_texts, num_labels=2, processing_class=tokenizer)
            >>> print(head.describe_for_card())
            ## Model
            ...
            - Trained: a linear head of 32 numbers, on 15 directions of the encoder's features
            ...
        """
        config = self.config
        revision = f" at revision `{config.encoder_revision}`" if config.encoder_revision else ""
        place = "is in this model" if config.save_encoder else "is loaded by its name"
        return _CARD.format(
            encoder=f"`{config.encoder}`{revision}" if config.encoder else "one without a name",
            place=place if config.encoder_config is not None else "is passed as `encoder`",
            count=f"{self.head.weight.numel():,}", directions=f"{config.directions:,}",
            public=config.public_data, task=config.task,
        )  # fmt: skip

    # --- features

    def differentiable(self, **inputs: Any) -> Tensor:
        """Return what `encode` returns, with derivatives where gradients are enabled."""
        return self._with_constant(self.raw_features(**inputs))

    @torch.no_grad()
    def encode(self, **inputs: Any) -> Tensor:
        """Return features of the encoder's inputs, `(..., directions + 1)`, of norm 1 each.

        Args:
            **inputs: What the encoder takes, by name.
        """
        return self.differentiable(**inputs)

    def raw_features(self, **inputs: Any) -> Tensor:
        """Return the encoder's features, before they are cut to directions.

        Args:
            **inputs: What the encoder takes, by name.

        Raises:
            ValueError: If there is no encoder.
        """
        if self.encoder is None:
            raise ValueError("The head has no encoder: give features, or attach_encoder first.")
        if not hasattr(self.encoder, "config"):
            features: Tensor = self.encoder(*inputs.values())
            return features.flatten(1)
        if self.config.pairs:
            assert self.config.sep_token_id is not None  # private_head saw to it
            return pair_features(self.encoder, inputs, self.config.sep_token_id)
        return layer_features(self.encoder, inputs)

    def public_features(self, **inputs: Any) -> Tensor:
        """Return the features of public samples by which directions are found, `(N, width)`.

        Args:
            **inputs: What the encoder takes, by name.
        """
        return self.raw_features(**inputs)

    def _with_constant(self, features: Tensor) -> Tensor:
        projected = F.normalize(self.directions(features.to(self.directions.weight)), dim=-1)
        size = self.config.constant
        constant = projected.new_full((*projected.shape[:-1], 1), size)
        return torch.cat([(1 - size**2) ** 0.5 * projected, constant], -1)

    def features_of(self, samples: Sequence[Any] | Tensor) -> Tensor:
        """Return features of texts or images, `(N, directions + 1)`, to train on.

        Each row has norm 1, and its last entry is a constant.

        Args:
            samples: Texts, pairs of texts, images, or what the encoder takes if it is no model of
                Transformers.
        """
        return torch.cat([self.encode(**inputs).cpu() for inputs in self.batches_of(samples)])

    def rows_of(self, samples: Sequence[Any]) -> list[Tensor]:
        """Return the features of each sample of a batch.

        Args:
            samples: Samples as `features_of` takes them.
        """
        return list(self.encode(**self.inputs_of(samples)).cpu())

    def batches_of(self, samples: Sequence[Any] | Tensor) -> Iterator[dict[str, Tensor]]:
        """Yield the encoder's inputs for samples, a batch at a time.

        Args:
            samples: Samples as `features_of` takes them.
        """
        for start in range(0, len(samples), BATCH):
            yield self.inputs_of(samples[start : start + BATCH])

    def inputs_of(self, samples: Sequence[Any] | Tensor) -> dict[str, Tensor]:
        """Return the encoder's inputs for a batch of samples.

        Args:
            samples: Samples as `features_of` takes them.
        """
        if self.config.encoder_config is None:
            stacked = samples if isinstance(samples, Tensor) else torch.stack(list(samples))
            return {"input": stacked.to(self.device)}
        inputs = processed(self.processing_class, list(samples), self.takes_images, self.config)
        return {name: entries.to(self.device) for name, entries in inputs.items()}

    # --- scores

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        features: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **inputs: Any,
    ) -> Any:
        """Compute the scores of samples, and with labels their loss.

        Args:
            input_ids: Token ids, `(B, T)`.
            attention_mask: 1 at real tokens, `(B, T)`.
            token_type_ids: Which text of a pair a token is of, `(B, T)`.
            pixel_values: Images, `(B, C, H, W)`.
            features: Features that `features_of` computed once, `(B, directions + 1)`, in the
                place of the encoder's inputs, so that a training need not compute them again.
            labels: Class ids `(B,)`, 0 or 1 for each class `(B, classes)`, or numbers.
            return_dict: `False` returns a tuple in the place of an object.
            **inputs: More of the encoder's inputs.
        """
        if features is None:
            named = {
                "input_ids": input_ids, "attention_mask": attention_mask,
                "token_type_ids": token_type_ids, "pixel_values": pixel_values,
            }  # fmt: skip
            inputs |= {name: entries for name, entries in named.items() if entries is not None}
            features = self.differentiable(**self._shortened(inputs))
        logits = self.head(features.to(self.head.weight.dtype))
        loss = None
        if labels is not None:
            loss = self._loss(logits, labels)
        output = self._output_class(loss=loss, logits=self._scaled(logits))
        return output.to_tuple() if return_dict is False else output

    def _shortened(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return inputs of which texts are as long as those that the head was trained on.

        Of a text's end its last token stays, which ends every text.
        """
        mask, longest = inputs.get("attention_mask"), self.config.max_length
        if mask is None or self.reads_words or mask.shape[1] <= longest:
            return inputs
        last = mask.sum(1, keepdim=True) - 1
        places = torch.arange(longest, device=mask.device).expand(len(mask), -1)
        places = places.where((places < longest - 1) | (last < longest), last)
        return {name: entries.gather(1, places) for name, entries in inputs.items()}

    _output_class: type = SequenceClassifierOutput

    def _scaled(self, logits: Tensor) -> Tensor:
        if self.config.problem_type != "regression":
            return logits
        return self.config.label_center + self.config.label_scale * logits

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over rows of what a row loses.

        A row of several classes loses the sum over them, for a mean would be below the clipping
        bound. A number's error is measured in units of `label_scale`.
        """
        problem = self.config.problem_type
        if problem == "regression":
            labels = labels.reshape(logits.shape).to(logits)
            errors = (logits - (labels - self.config.label_center) / self.config.label_scale) ** 2
            return errors.sum(-1).mean() / 2
        if problem == "multi_label_classification":
            losses = F.binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="none")
            return losses.sum(-1).mean()
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


class PrivateHeadForSequenceClassification(PrivateHead):
    """A private head for texts or pairs of texts.

    Example:
        >>> from hf_gradguard.heads import private_head
        >>> head = private_head(model, public_texts, num_labels=2, processing_class=tokenizer)
        >>> features = head.features_of(["a long film", "a plot"])
        >>> head(features=features, labels=torch.tensor([0, 1])).loss
        tensor(0.6931, grad_fn=<NllLossBackward0>)
    """


class PrivateHeadForImageClassification(PrivateHead):
    """A private head for images.

    Example:
        >>> from hf_gradguard.heads import private_head
        >>> public, images = torch.rand(9, 3, 4, 4), torch.rand(2, 3, 4, 4)
        >>> head = private_head(nn.Flatten(), public, task="image-classification")
        >>> head(features=head.features_of(images)).logits.shape
        torch.Size([2, 2])
    """

    task = "image-classification"
    takes_images = True
    _output_class = ImageClassifierOutput


class PrivateHeadForTokenClassification(PrivateHead):
    """A private head for the words of texts, each of which has a class.

    A row is a text. Its loss is the mean over its words, and its gradient is clipped as one.

    Example:
        >>> from hf_gradguard.heads import private_head
        >>> settings = {"labels": ["O", "B-PER"], "processing_class": tokenizer}
        >>> head = private_head(model, public_texts, task="token-classification", **settings)
        >>> rows = head.prepare_dataset([{"tokens": ["a", "film"], "ner_tags": ["O", "O"]}])
        >>> rows[0]["features"].shape, rows[0]["labels"]
        (torch.Size([2, 31]), tensor([0, 0]))
    """

    task = "token-classification"
    reads_words = True
    data_collator = staticmethod(collate_tokens)

    _output_class = TokenClassifierOutput

    def raw_features(self, **inputs: Any) -> Tensor:
        if self.encoder is None:
            raise ValueError("The head has no encoder: give features, or attach_encoder first.")
        return token_features(self.encoder, inputs)

    def rows_of(self, samples: Sequence[Any]) -> list[Tensor]:
        """Return features of the words of texts, which are those of their first tokens.

        Args:
            samples: Lists of words. Those that the encoder does not read to its end are left out.

        Returns:
            The features of each text, `(words, directions + 1)`.

        Raises:
            ValueError: If the tokenizer does not say which word a token is of.
        """
        encoding: Any = processed(self.processing_class, list(samples), False, self.config)
        if not getattr(encoding, "is_fast", False):
            raise ValueError("Words take a fast tokenizer, which says which word a token is of.")
        features = self.encode(**{n: entries.to(self.device) for n, entries in encoding.items()})
        rows = []
        for number in range(len(samples)):
            words = encoding.word_ids(number)
            firsts = {word: place for place, word in reversed(list(enumerate(words)))}
            firsts.pop(None, None)
            rows.append(features[number, [firsts[word] for word in sorted(firsts)]].cpu())
        return rows

    def public_features(self, **inputs: Any) -> Tensor:
        """Return features of some tokens of each text, `(N, width)`.

        Args:
            **inputs: What the encoder takes, by name.
        """
        features = self.raw_features(**inputs)
        mask = inputs["attention_mask"].bool()
        order = torch.rand(mask.shape, generator=torch.Generator().manual_seed(0)).to(mask.device)
        places = order.where(mask, -1.0).topk(min(_TOKENS, mask.shape[1])).indices
        is_chosen = torch.zeros_like(mask).scatter(1, places, True)
        return features[is_chosen & mask]


def new_encoder(config: PrivateHeadConfig) -> nn.Module:
    """Return the encoder that a configuration describes, at random.

    Args:
        config: The head's configuration.
    """
    settings = dict(config.encoder_config or {})
    settings.pop("transformers_version", None)
    encoder_config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    encoder = AutoModel.from_config(encoder_config, trust_remote_code=False)
    return taken_of(encoder)


def load_encoder(name: str, revision: str | None = None) -> nn.Module:
    """Load an encoder by its name or from a folder, in eval mode.

    Args:
        name: A name on the Hub, or a folder.
        revision: A branch, tag or commit of the Hub.

    Raises:
        FileNotFoundError: If neither a folder nor the Hub has it.
        ModelError: If it was saved without weights that it needs, which would be random.
    """
    with explain_missing_model(name):
        encoder, loading_info = AutoModel.from_pretrained(
            name, revision=revision or "main", output_loading_info=True, trust_remote_code=False
        )
    lacking = sorted(key for key in loading_info["missing_keys"] if "pooler" not in key)
    if lacking:
        raise ModelError(
            f"{name} was saved without {', '.join(lacking[:3])}, which would be random, and others "
            "in the next run. Take another encoder."
        )
    return taken_of(encoder).eval()


def taken_of(encoder: nn.Module) -> nn.Module:
    """Return the part of a model that a head takes features of: of CLIP, what reads images."""
    reader: nn.Module = getattr(encoder, "vision_model", encoder)
    return reader


AutoConfig.register(PrivateHeadConfig.model_type, PrivateHeadConfig, exist_ok=True)
for _auto, _head in (
    (AutoModelForSequenceClassification, PrivateHeadForSequenceClassification),
    (AutoModelForImageClassification, PrivateHeadForImageClassification),
    (AutoModelForTokenClassification, PrivateHeadForTokenClassification),
):
    _auto.register(PrivateHeadConfig, _head, exist_ok=True)
