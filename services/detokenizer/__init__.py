"""Turns tokens into text, token by token, and ends a request at its stop strings. `python -m services.detokenizer`."""
