"""Tests that ask the same two stacks, which are started once for all files of this folder."""
