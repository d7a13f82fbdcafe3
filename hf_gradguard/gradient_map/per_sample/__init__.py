"""What each sample of a batch adds to its gradient, from one pass."""
