"""Multi-head latent attention: its weights, and what it computes."""
