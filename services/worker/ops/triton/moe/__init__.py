"""Mixtures of experts: routing, and products of rows with their experts."""
