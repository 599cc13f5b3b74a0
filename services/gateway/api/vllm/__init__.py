"""What vLLM's API alone has."""
