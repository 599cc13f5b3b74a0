"""What can go wrong: one class for each kind of fault, with what it strikes, how it is healed and what it may cost."""
