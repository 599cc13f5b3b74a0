"""Architectures whose Python code comes with their checkpoints: by the native decoder (ADR 216), and Step-3.5 by the
library (ADR 227)."""
