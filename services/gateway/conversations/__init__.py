"""Conversations that are stored: items that responses go on from, and add to."""
