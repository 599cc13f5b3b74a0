"""The operations that models are made of, and the tensors' way to a device: an interface, and its implementations."""
