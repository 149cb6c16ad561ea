"""What the user sees while the program runs: progress, on a terminal or in a notebook."""
