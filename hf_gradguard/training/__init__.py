"""The protected Trainer: each client's batch becomes one protected message, and then is shared."""
