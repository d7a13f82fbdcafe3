"""Assignment of rows to clients: clients of a rank, and federations in simulation."""
