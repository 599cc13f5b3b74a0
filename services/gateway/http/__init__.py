"""HTTP: the listening socket, connections, routes, endpoints, streaming, and the limits of each."""
