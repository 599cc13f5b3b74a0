"""Makes docs/ a site: `make docs` (docs/adr/0085)."""
