"""The HTTP side: sockets, routes, reading bodies, writing answers."""
