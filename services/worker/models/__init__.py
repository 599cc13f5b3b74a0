"""Dense decoder-only language models, read from Hugging Face directories and run on any `Ops`."""
