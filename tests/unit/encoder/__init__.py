"""Of services/encoder."""
