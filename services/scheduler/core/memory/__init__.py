"""KV memory of the ranks as the scheduler sees it: the pool of blocks, the index of prefixes, and block tables."""
