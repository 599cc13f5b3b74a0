"""Which requests wait and which run: queues, grammars being compiled, and prompts that another request computes."""
