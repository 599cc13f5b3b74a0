"""Model architectures that packages bring, by the entry point group `baton.models`."""
