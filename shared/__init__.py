"""The vocabulary every service speaks. Imports nothing else of ours."""
