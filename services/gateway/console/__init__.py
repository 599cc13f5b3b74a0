"""What the console shows: the stack as one document that changes, computed only while somebody looks."""
