"""Pages for people, from files of the package: `/docs` and `/console`."""
