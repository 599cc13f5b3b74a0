"""Tests of `shared/media`."""
