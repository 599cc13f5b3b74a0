"""Tests that need a browser: Chromium, as Debian has it, driven by Playwright. `make test-extras` runs them."""
