"""Ollama's API: its requests as chats and completions, and the answers in its shape."""
