"""What layers of several streams have: their weights."""
