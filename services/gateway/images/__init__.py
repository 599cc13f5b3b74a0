"""Where images of requests come from, and what makes rows of them."""
