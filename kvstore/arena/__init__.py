"""Arenas: files in shared memory that hold KV blocks. Headers, checksums, growth, the directory. Decides nothing."""
