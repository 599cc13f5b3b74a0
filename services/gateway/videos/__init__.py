"""Videos of requests: decoded in processes of their own, and made rows of."""
