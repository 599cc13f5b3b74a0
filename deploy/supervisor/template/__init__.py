"""A process that has imported what a worker needs, of which new workers are forked in milliseconds (ADR 40)."""
