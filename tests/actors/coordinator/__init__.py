"""Coordinator."""
