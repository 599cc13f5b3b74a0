"""How near to the hardware's limits a rank computes: the limits, a model's steps and single kernels, in one run."""
