"""The study of an attacker that learns to invert."""

from __future__ import annotations

from collections import Counter

import torch

from hf_gradguard import GradientMap
from recipes.studies.learned_inversion import PublicLayers, TokenReader
from recipes.studies.lib.text import load_classifier, load_tokenizer


def test_learned_inversion(encoder, sst2, quick, tmp_path):
    data = ("--model", encoder, "--data_dir", sst2)
    study = quick("learned_inversion", *data, output=tmp_path / "learned")
    assert [row[0] for row in study.rows()] == ["no message", "none"]
    scores = study.figures["none"]["span"]["token_f1"]
    assert len(scores) == 2
    assert min(scores) > 0.9  # span reads what is undefended


def test_a_token_reader_tells_which_tokens_are_in_a_message(encoder):
    """Of undefended messages of six random tokens of 60 it names more than half, by chance one."""
    torch.manual_seed(0)
    tokenizer, model = load_tokenizer(str(encoder)), load_classifier(str(encoder))
    first = len(tokenizer.all_special_ids)
    texts = [(first + torch.randperm(60)[:6]).tolist() for _ in range(220)]
    batches = []
    for number, text in enumerate(texts):
        ids = torch.tensor([[tokenizer.cls_token_id, *text, tokenizer.sep_token_id]])
        batches.append({"input_ids": ids, "labels": torch.tensor([number % 2])})
    counts = Counter(token for text in texts for token in text)
    layers = PublicLayers(model, batches[:100])
    reader = TokenReader(layers, counts, seed=0)
    for number in range(100, 200):
        message = GradientMap(model, batches[number]).gradient()
        reader.add(message, number % 2, set(texts[number]))
    reader.learn()
    found = 0
    for number in range(200, 220):
        message = GradientMap(model, batches[number]).gradient()
        found += len(set(texts[number]) & set(reader.likeliest(message, number % 2, 6)))
    assert found > 60  # of 120; 12 by chance
