"""A model's files go from host to host: named by what is in them, sent over mutual TLS, checked chunk by chunk."""
