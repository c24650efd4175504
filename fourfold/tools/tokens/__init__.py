"""Work on token files: `fourfold data inspect | verify | merge | split | convert | blend`."""
