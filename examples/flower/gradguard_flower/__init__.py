"""Federated learning with Flower in which clients send protected updates only."""
