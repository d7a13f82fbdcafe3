"""Whose rows are in a batch: clients of a rank, and federations in simulation."""
