"""Endpoints of other APIs than OpenAI's, each over the same requests."""
