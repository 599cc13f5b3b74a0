"""Chats in the shape of version 2 of Cohere's API."""
