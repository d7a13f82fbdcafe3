"""What is refused before a training begins, and what is watched while it runs."""
