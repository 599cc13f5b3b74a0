"""The commands that say, without a GPU, how large a stack should be and how it should be set."""
