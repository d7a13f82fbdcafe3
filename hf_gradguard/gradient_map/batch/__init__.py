"""What a batch holds: texts and their padding, pixels, labels, and tables that its ids index."""
