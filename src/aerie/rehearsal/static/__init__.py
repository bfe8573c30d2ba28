"""What can be known in seconds, from configuration and headers alone."""
