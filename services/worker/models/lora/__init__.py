"""LoRA adapters (Hu et al., arXiv:2106.09685) beside one base model: read, kept, and computed."""
