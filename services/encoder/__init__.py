"""Makes rows of images, which stand in a prompt in place of tokens' embeddings."""

from shared.config import default_environment

# As for a worker's (`services/worker/__init__.py`): an encoder's threads share the processors with its engines', and
# one that spins where another is to run holds up every operation.
default_environment({"GOMP_SPINCOUNT": "3000"}, unless="OMP_WAIT_POLICY")
