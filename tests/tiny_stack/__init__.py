"""A stack of actors that do nothing but live: what the supervisor is tested on."""
