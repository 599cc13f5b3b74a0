"""`baton top`: what the stack does, as tables drawn anew or as JSON."""
