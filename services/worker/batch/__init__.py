"""A step's sequences and rows on the host, and their way to the device."""
