"""Of services/gateway/core."""
