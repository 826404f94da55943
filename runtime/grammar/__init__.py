"""Constraints on output."""
