"""What changes the sizes of a stack's pools, wherever its processes run: a supervisor, or Kubernetes."""

from deploy.launchers.interface import Launcher, PoolChange

__all__ = ["Launcher", "PoolChange"]
