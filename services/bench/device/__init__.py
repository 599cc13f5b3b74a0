"""Benchmarks of a device: a model's steps and single kernels, measured by a worker's code in its own process."""
