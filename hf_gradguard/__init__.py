"""Share gradients, not the data in them: protected training for the Hugging Face Trainer."""

from .config import GradGuardConfig
from .defenses import DEFENSES, chain, make_defense
from .gradient_map import GradientMap
from .trainer import GradGuardTrainer

__all__ = ["DEFENSES", "GradGuardConfig", "GradGuardTrainer", "GradientMap", "chain", "make_defense"]
__version__ = "0.1.0"
