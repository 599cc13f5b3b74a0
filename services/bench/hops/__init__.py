"""`bench hops`: what each process and message between a request and its tokens costs."""
