"""``/v1/responses``: answers that the server remembers, as items and as events."""
