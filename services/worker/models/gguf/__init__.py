"""GGUF, the files of llama.cpp: read, and made directories as Hugging Face has them."""
