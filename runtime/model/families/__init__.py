"""One decoder an architecture family."""
