"""Gradient matching: the input whose gradient is the one that was shared."""
