"""Models of texts that the library has as a part of others alone."""
