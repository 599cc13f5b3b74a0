"""Mixers with states in PyTorch, on any device."""
