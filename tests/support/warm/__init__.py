"""Templates of stacks are forked from processes that have imported all they need: importing PyTorch takes half of the
processor time of a stack, and tests start hundreds."""
