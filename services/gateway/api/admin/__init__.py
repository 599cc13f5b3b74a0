"""Bodies of the endpoints for operators."""
