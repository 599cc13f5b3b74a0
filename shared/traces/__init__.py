"""Requests on their way through the services, as these remember them."""
