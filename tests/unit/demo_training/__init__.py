"""Tests of tests/demo_training."""
