"""Unit tests of `services.worker`, in the folders of its packages."""
