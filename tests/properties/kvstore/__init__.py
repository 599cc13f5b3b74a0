"""Kvstore."""
