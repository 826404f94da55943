"""The gateway: programs in, token requests out, text back."""
