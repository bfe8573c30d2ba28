"""What can be known in two seconds, from configuration and headers alone."""
