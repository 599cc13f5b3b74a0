"""The files of the console: plain modules that browsers load as they are, and Preact with htm, as npm's htm 3.1.1 has it."""
