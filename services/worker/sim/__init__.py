"""A backend without a device: a timing model of an accelerator, and tokens that depend on seed and position only."""
