"""Tools that a request offers: what the client may say of them, and grammars that make the model call them rightly."""
