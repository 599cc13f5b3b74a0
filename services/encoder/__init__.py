"""Makes rows of images, which stand in a prompt in place of tokens' embeddings."""
