"""Derivatives of the gradient as differences of passes a little apart."""
