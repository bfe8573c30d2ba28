"""The whole start-up before the long load: static checks, then the engine with a shrunken copy of the real pair."""
