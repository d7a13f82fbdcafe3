"""Reading files and data sets, and the packaged sentences."""
