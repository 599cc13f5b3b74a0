"""The shapes of OpenAI's API: JSON bodies read as checked requests or as errors that name the field, and responses."""
