"""The shapes of files and batches in OpenAI's API. Nothing of where they are kept."""
