"""What knowing a defense gives an attacker, from figures written by hand."""

from __future__ import annotations

import argparse

from recipes.studies.candidates import FortyEight
from recipes.studies.every_defense import Images, Texts
from recipes.studies.lib.results import Results


def test_the_strength_that_says_most_and_a_verdict_by_intervals(quick, tmp_path):
    whole = argparse.Namespace(quick=False, all=True, output=None)
    by_hand = {
        (Texts, ("pruning ratio=0.5", "tag")): {"token_f1": [0.5, 0.4, 0.6]},
        (Texts, ("pruning ratio=0.5", "tag, adaptive")): {"token_f1": [0.7, 0.55, 0.8]},
        (Texts, ("pruning ratio=0.9", "tag")): {"token_f1": [0.1, 0.0, 0.2]},
        (Texts, ("pruning ratio=0.9", "tag, adaptive")): {"token_f1": [0.9, 0.8, 1.0]},
        (Texts, ("pruning ratio=0.9", "lamp")): {
            "token_f1": [0.1, 0.0, 0.2]
        },  # no other to compare
        (Images, ("soteria ratio=0.5", "idlg")): {"psnr": [20.0, 19.0, 21.0]},
        (Images, ("soteria ratio=0.5", "idlg, adaptive")): {"psnr": [10.0, 9.0, 11.0]},
        (FortyEight, ("pruning", "initial", "1")): {
            "ratio=0.9|knows": {"top1": [0.5, 0.2, 0.8]},
            "ratio=0.9|does not": {"top1": [0.4, 0.1, 0.7]},
        },
    }
    for (part, place), figures in by_hand.items():
        cells = part(whole).cells()
        Results(tmp_path / part.__name__).add(cells[place], figures)
    given = [
        ("--text_defenses", Texts), ("--image_defenses", Images), ("--candidates", FortyEight),
    ]  # fmt: skip
    data = [word for flag, part in given for word in (flag, tmp_path / part.__name__)]
    study = quick("knowing", *data, output=tmp_path / "knowing")
    assert study.rows() == [
        ["`pruning`", "candidates, text, initial model", "`ratio=0.9`",
         "0.40 [0.10, 0.70]", "0.50 [0.20, 0.80]", "cannot tell"],
        ["`pruning`", "tag, text", "`ratio=0.9`",
         "0.10 [0.00, 0.20]", "0.90 [0.80, 1.00]", "matters"],
        ["`soteria`", "idlg, images", "`ratio=0.5`",
         "20.0 [19.0, 21.0]", "10.0 [9.0, 11.0]", "does harm"],
    ]  # fmt: skip
