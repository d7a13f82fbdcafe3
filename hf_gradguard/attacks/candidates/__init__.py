"""Membership inference: which of a list of candidates are behind a message."""
