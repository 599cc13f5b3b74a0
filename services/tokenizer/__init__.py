"""Turns prompts into tokens: chat templates, text, token ids. Stateless. `python -m services.tokenizer`."""
