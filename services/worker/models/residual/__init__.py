"""What passes between the layers of a decoder."""
