"""Averages over ranks in which nobody sees a single rank's contribution, by masks that cancel.

A Trainer with `secure_aggregation=True` imports this room, and so does code that makes a
`SecureAggregation` for `hf_gradguard.protect`; nothing else does.
"""

from .aggregation import SecureAggregation as SecureAggregation
