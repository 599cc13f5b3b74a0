"""Which settings serve a load best: trials of settings on the simulator or on real stacks, and what came of them."""
