"""`baton chaos`: faults on a seeded schedule under load on a stack of its own, and what clients saw of them."""
