"""Refiner: share the gradient of robust data, which looks like noise.

`published.py` is the form of the paper, `synthetic.py` the one that teaches.
"""

from .defense import Refiner

__all__ = ["Refiner"]
