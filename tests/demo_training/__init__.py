"""What made the model, the drafters and the prompts in `deploy/demo`; no part of what is installed."""
