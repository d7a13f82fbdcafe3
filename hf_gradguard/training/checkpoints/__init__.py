"""Which checkpoints are complete, and a rank's private file in them."""
