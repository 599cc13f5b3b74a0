"""What tests rely on themselves."""
