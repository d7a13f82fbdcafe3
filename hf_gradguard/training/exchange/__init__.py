"""Exchanges between ranks: averages of protected gradients, and the agreement before training."""
