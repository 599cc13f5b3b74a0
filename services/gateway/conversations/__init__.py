"""What is kept of chats beyond their requests: conversations, and chats with their answers."""
