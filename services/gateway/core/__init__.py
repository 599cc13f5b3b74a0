"""What the gateway decides about open requests, and what it knows of the other services. Pure: no bus, clock or
HTTP."""
