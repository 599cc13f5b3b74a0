"""Copying blocks of keys and values between a rank's memory and its node's KV store."""
