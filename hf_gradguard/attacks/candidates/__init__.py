"""A list of candidates, and which of them is behind a message."""
