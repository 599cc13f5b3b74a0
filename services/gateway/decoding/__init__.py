"""What having a client's file decoded by a process of its own takes, whatever the file is."""
