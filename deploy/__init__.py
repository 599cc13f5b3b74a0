"""How Baton is run: the `baton` command, the local supervisor, images, and the demo model."""
