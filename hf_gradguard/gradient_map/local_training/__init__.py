"""Clients that train for some steps and send the change of their weights."""
