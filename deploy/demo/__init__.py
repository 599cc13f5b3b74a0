"""The demo model, its drafters and prompts; `tests/demo_training` made them."""
