"""Measurements that need processes of their own: an engine by itself, without gateways, tokenizers and coordinators."""
