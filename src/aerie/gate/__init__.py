"""Asks a running service from outside, with the standard library only: wait for it, probe it, show it, talk to it."""
