"""Hospitals that train one classifier by proof, none of which shows its rows."""
