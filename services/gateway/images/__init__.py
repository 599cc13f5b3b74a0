"""Where images of requests come from, and what makes rows of them; so of prompts that an encoder reads."""
