"""Tests of services/bench."""
