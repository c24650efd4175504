"""Tools that training does not import: text to token files (`prepare`), work on token files
(`tokens`), and whether a run met its target (`targets`)."""
