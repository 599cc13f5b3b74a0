"""What ranks compute on: CPUs, CUDA's GPUs, and what packages bring by the entry point group `baton.platforms`."""
