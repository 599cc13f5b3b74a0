"""Media in the fields of the API."""
