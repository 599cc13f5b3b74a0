"""One rank of an engine: a process that executes step plans on a device."""
