"""Tests of deploy/wheel."""
