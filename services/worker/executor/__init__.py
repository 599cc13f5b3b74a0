"""Runs plans step by step: prepares, launches, and gathers what came of them."""
