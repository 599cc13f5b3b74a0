"""The JSON fields that endpoints share, and which values they may have."""
