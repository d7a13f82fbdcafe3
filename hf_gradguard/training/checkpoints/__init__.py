"""Completeness of checkpoints, and a rank's private file in them."""
