"""What the supervisor decides: who is there, who is restarted and when, in which order all end. No processes here."""
