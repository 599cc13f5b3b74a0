"""What a hostile client does to a server, one kind of attack a function, and what it was answered."""
