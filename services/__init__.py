"""One folder per service; each is its own process (`python -m services.X`) and imports no other."""
