"""Tests of shared/actor."""
