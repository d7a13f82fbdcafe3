"""Rows of the tables: attacks and their settings."""

from ..lib.images import INVERTING

DATA = ("cifar10", "mnist")
IMAGES = {
    "dlg": {"steps": 100, "start": "uniform"},
    "idlg": {"steps": 100, "start": "uniform"},
    "inverting_gradients": {"steps": 100, **INVERTING},
    "inverting_gradients, as published": {"steps": 4800},
}
TEXT = {"tag": {"steps": 1500}}
FULL = {"images": 16, "sentences": 20}
QUICK = {"images": 2, "sentences": 2}
