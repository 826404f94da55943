"""Everything from a message to a token: gateway, program interpreter, engine, memory, model."""
