"""The contribution of each sample of a batch to its gradient, from one pass."""
