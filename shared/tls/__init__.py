"""TLS of those who ask a server by HTTPS."""
