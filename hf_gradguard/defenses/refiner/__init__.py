"""Refiner, which shares the gradient of robust data that looks like noise.

`defense.py` has the defense and its cosine form, `published.py` the weighted form and with it the
paper's.
"""

from .defense import Refiner

__all__ = ["Refiner"]
