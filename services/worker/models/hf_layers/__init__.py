"""What a Hugging Face config says of its layers: mixtures of experts, latent attention. No torch."""
