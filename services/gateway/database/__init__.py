"""What outlives a request: records and their contents, in SQLite, Postgres or Redis."""
