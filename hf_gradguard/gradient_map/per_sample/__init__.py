"""The contribution of each sample of a batch to the batch's gradient, from one pass."""
