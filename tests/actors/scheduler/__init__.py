"""Scheduler."""
