"""Torch references: what every kernel must equal, and what runs on the CPU."""
