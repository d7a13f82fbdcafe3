"""Readers of files and data sets, and the packaged sentences."""
