"""The HTTP server: OpenAI's and SGLang's endpoints over the gateway's own generations."""
