"""A program for the template of workers: it does what its first argument says."""
