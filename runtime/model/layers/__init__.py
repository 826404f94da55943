"""Layers that decoders are built from."""
