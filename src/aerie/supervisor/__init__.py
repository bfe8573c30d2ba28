"""Runs the engine as its child: output, signals, readiness, restarts, and the one state that everybody reads."""
