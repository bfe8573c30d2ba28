"""Model checkpoints on disk."""
