"""`bench prefixes`: how much the prompts of a file repeat their beginnings."""
