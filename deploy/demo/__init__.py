"""The demo model: a four-million-parameter Llama, trained here on text that is generated here."""
