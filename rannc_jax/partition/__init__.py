"""Where to cut, and how many copies: from prices of blocks to a decision."""
