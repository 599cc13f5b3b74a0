"""How prompts become token ids: templates, the vocabulary, refusals. No bus, no threads. Read `encoder.py` first."""
