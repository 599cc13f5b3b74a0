"""Campaigns of measurements, of Baton alone and beside others: `baton bench gpu` and `baton bench peers`.

They need the repository, as they run its tests and shapes, and are no part of what is installed.
"""
