"""How prompts become vectors, as a checkpoint says it."""
