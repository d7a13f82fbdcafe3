"""Differential privacy for labels and for the rows of a data set."""
