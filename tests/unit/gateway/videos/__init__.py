"""Videos of requests."""
