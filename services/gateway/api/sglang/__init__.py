"""SGLang's own API."""
