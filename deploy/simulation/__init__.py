"""`baton simulate`: the real coordinator and scheduler cores on a virtual clock, with simulated devices."""
