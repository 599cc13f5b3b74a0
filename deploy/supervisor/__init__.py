"""Starts Baton's services as processes of this machine, keeps them alive, scales them, and stops them in order."""
