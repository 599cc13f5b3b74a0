"""Decoders whose layers choose the blocks of keys that they attend to."""
