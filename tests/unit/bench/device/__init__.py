"""Device."""
