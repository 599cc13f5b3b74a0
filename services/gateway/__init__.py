"""The gateway: the only service that clients see. Speaks the OpenAI API and supervises every request."""
