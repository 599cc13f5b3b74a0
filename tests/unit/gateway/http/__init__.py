"""Of services/gateway/http."""
