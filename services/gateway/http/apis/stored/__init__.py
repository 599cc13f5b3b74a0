"""Endpoints of what is stored item by item."""
