"""Programs as data, and the interpreter that runs them over an executor. Torch-free."""
