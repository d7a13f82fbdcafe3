"""Averages over ranks of which nobody sees a single rank's part, by masks that cancel.

`secure_aggregation=True` imports this room, and so does who makes a `SecureAggregation` for
`hf_gradguard.protect`; nothing else does.
"""

from .aggregation import SecureAggregation as SecureAggregation
