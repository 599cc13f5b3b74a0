"""Swagger UI 5.35.0 as npm's `swagger-ui-dist` has it, packed by gzip and without the lines that name source maps."""
