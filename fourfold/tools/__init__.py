"""Tools around token files, which training does not import: see `prepare` and `tokens`."""
