"""The experts of a mixture on their way from a checkpoint to operations."""
