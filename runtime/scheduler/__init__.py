"""Which requests run next, as plain data: no model, no device."""
