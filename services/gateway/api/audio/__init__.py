"""`/v1/audio`: what its forms ask for, and the shapes of its answers."""
