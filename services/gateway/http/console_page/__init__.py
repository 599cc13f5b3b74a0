"""The files of the console: plain modules that browsers load as they are, on Preact with htm (npm's htm 3.1.1)."""
