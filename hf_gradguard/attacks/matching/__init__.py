"""Gradient matching, which finds the input whose gradient is the one that was shared."""
