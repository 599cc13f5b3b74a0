"""What clients get: frames of a stream, bodies, usage, log-probabilities."""
