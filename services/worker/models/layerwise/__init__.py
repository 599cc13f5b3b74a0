"""A decoder whose layers are followed one by one while it computes."""
