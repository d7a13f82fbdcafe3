"""Estimators of how much could leak, computed from derivatives of the gradient map.

No attack is run.

Example:
    >>> bound = inversion_influence_lower_bound(gmap, delta)  # how far delta moves a reconstruction
    >>> leakage = dfil(gmap, noise_variance=1e-6)  # Fisher information, for every sample
    >>> bound > 0, leakage.value.shape
    (True, torch.Size([2]))
"""

from ..gradient_map.views import smooth_clip, smoothly_clipped
from ..registry import ESTIMATORS
from .accountant import FisherAccountant, example_keys, gaussian_epsilon, subsampling_factor
from .balls_in_bins import (
    balls_in_bins_epsilon,
    balls_in_bins_noise_multiplier,
    balls_in_bins_power,
)
from .bounds import (
    mse_bound_from_dfil,
    mse_bound_from_norm,
    mse_bound_from_rdp,
    mse_bound_of_biased,
    mse_bound_with_prior,
    rdp_of_order_two,
)
from .differential_privacy import (
    PrivacyAccount,
    dp_sgd_epsilon,
    dp_sgd_noise_multiplier,
    membership_power,
)
from .fisher import (
    DFIL,
    bayesian_bound,
    dfil,
    fisher_norm,
    fisher_trace,
    prior_deviation,
)
from .gram import Eigenvalue, Estimate, Influence
from .influence import (
    Directions,
    Estimator,
    expected_squared_influence,
    inversion_influence,
    inversion_influence_lower_bound,
    largest_eigenvalue,
    make_estimator,
    one_product_bound,
    smallest_directions,
)
from .labels import label_information, label_success_bound
from .received import Finding, check_received

__all__ = [
    "DFIL",
    "ESTIMATORS",
    "Directions",
    "Eigenvalue",
    "Estimate",
    "Estimator",
    "Finding",
    "FisherAccountant",
    "Influence",
    "PrivacyAccount",
    "balls_in_bins_epsilon",
    "balls_in_bins_noise_multiplier",
    "balls_in_bins_power",
    "bayesian_bound",
    "check_received",
    "dfil",
    "dp_sgd_epsilon",
    "dp_sgd_noise_multiplier",
    "example_keys",
    "expected_squared_influence",
    "fisher_norm",
    "fisher_trace",
    "gaussian_epsilon",
    "inversion_influence",
    "inversion_influence_lower_bound",
    "label_information",
    "label_success_bound",
    "largest_eigenvalue",
    "make_estimator",
    "membership_power",
    "mse_bound_from_dfil",
    "mse_bound_from_norm",
    "mse_bound_from_rdp",
    "mse_bound_of_biased",
    "mse_bound_with_prior",
    "one_product_bound",
    "prior_deviation",
    "rdp_of_order_two",
    "smallest_directions",
    "smooth_clip",
    "smoothly_clipped",
    "subsampling_factor",
]
