"""The shapes of OpenAI's Decisions API."""
