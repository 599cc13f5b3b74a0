"""Of services/encoder/core."""
