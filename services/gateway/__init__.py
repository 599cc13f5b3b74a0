"""The gateway: OpenAI's HTTP API in front of the other services, and the supervision of every open request."""
