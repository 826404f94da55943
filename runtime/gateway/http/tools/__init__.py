"""Calls of tools in what a model writes: one state machine for each way of writing them."""
