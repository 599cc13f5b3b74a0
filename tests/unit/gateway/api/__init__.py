"""Of services/gateway/api."""
