"""Data-parallel attention: engines that share the experts of a mixture, and all else of which has each for itself."""
