"""OpenAI's Responses API: its requests as chats, and the answers in its shape."""
