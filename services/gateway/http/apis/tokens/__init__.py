"""vLLM's endpoints of token ids."""
