"""What takes token ids and gives what belongs to token ids, as vLLM alone has it."""
