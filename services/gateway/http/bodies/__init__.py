"""What bodies are read within."""
