"""The weights under /data/models: fetched, proven, published whole, verified, freed; the host's page cache warmed."""
