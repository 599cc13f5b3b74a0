"""What installed packages bring to Baton, by entry points (docs/plugins.md)."""
