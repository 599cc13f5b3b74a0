"""Makes rows of images, which stand in a prompt in place of tokens' embeddings."""

from shared.config import sleep_behind_operations

sleep_behind_operations()  # an encoder's threads share the processors with its engines'
