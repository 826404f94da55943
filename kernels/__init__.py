"""Kernels over tensors. Each Triton kernel stands beside the torch reference that it must equal."""
