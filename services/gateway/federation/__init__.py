"""Clusters that take each other's requests, gateway to gateway (docs/federation.md)."""
