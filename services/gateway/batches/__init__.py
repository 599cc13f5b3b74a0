"""Files that clients upload, and batches of requests that gateways answer beside all others."""
