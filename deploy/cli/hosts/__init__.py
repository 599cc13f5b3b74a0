"""`baton join` and `baton token`: a stack of several hosts."""
