"""Of services/gateway/images."""
