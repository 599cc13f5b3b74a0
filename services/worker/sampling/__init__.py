"""Draws next tokens: a pure function of logits, parameters, seed and output position, over a whole batch."""
