"""How a service is watched: Prometheus metrics and JSON log lines."""
