"""How the project becomes a wheel whose only top-level name is `baton` (docs/adr/0016)."""
