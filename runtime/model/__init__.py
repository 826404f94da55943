"""Weights, decoders and samplers."""
