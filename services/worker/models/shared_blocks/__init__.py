"""Blocks of attention and an MLP whose weights layers at several depths share."""
