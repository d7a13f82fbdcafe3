"""Who a network was trained on, told from what it makes of each image.

References: Yeom et al., "Privacy Risk in Machine Learning" (2018), who threshold the loss; Watson
et al., "On the Importance of Difficulty Calibration in Membership Inference Attacks" (2022), who
take off it what other networks make of the image; Carlini et al., "Membership Inference Attacks
From First Principles" (2022), from whom the scale is, and that some of the others saw the image.
"""

import numpy as np
import torch
from torch import Tensor, nn

from hf_gradguard.metrics import score_candidates

ATTACKERS = ("loss", "beside undefended networks", "beside networks behind the same defense")


@torch.no_grad()
def log_odds(model: nn.Module, pixels: Tensor, labels: Tensor) -> np.ndarray:
    """`(2, N)`: ln p/(1 - p) of the label's probability p, of each image and of its mirror image.

    Args:
        model: A classifier of `pixel_values`.
        pixels: `(N, 3, H, W)` in uint8.
        labels: `(N,)`.
    """
    views = []
    for view in (pixels, pixels.flip(-1)):
        logits = torch.cat([model(x.float() / 255).logits for x in view.split(500)]).double()
        own = logits.gather(1, labels[:, None])
        others = logits.scatter(1, labels[:, None], -torch.inf)
        views.append(own[:, 0] - others.logsumexp(1))
    return torch.stack(views).numpy()


def by_loss(odds: np.ndarray) -> np.ndarray:
    """`(N,)`: less the loss, the mean over views.

    Args:
        odds: `(2, N)`, of the network in question.
    """
    return -np.logaddexp(0, -odds).mean(0)


def by_difficulty(odds: np.ndarray, others: np.ndarray, owned: np.ndarray) -> np.ndarray:
    """`(N,)`: how much higher the log odds are than is usual of the image, among networks that did
    not see it. Those that did have more; by how much on average, images tell that some saw and some
    did not.

    Args:
        odds: `(2, N)`, of the network in question.
        others: `(R, 2, N)`, of two networks or more that the attacker trained.
        owned: `(R, N)`: on which images he trained each.
    """
    means, seen = others.mean(1), owned - owned.mean(0)
    means = means - means.mean(1, keepdims=True)
    gain = (seen * means).sum() / (seen**2).sum()
    return odds.mean(0) - (means - gain * owned).mean(0)


def told(scores: np.ndarray, owned: np.ndarray) -> dict[str, float]:
    """Area under the curve (0.5 is chance), and the share of members told at 1 % false alarms.

    Args:
        scores: `(N,)`: higher for who is rather a member.
        owned: `(N,)`: who is.
    """
    found = score_candidates([scores], [np.flatnonzero(owned)], bootstrap=0)
    return {"area": round(found.area, 4), "tpr_1%": found.mean["tpr_1%"]}
