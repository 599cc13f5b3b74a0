"""Tests, and what they need; how many threads libraries use is said before any of them is imported."""

import os

# Models of tests are too small for several threads, and tests run side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")
