"""Serves Kimi-K2.5 with EAGLE-3 speculative decoding on vLLM: supervised, gated, deployed."""

__version__ = "0.1.0"
