"""The stack's processes on the nodes of a Ray cluster (ADR 45): an engine is a placement group."""
