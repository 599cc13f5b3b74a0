"""Actors of several services in one process of a stack."""
