"""Readers of weights: safetensors, GGUF, dummy."""
