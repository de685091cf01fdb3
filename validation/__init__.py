"""Measured tables and the architectures that only they name; `simkit.spec.models` reads `models.csv`."""
