"""Of services/gateway."""
