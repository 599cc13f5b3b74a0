"""Of services/gateway/parsing."""
