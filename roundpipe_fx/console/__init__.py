"""Progress that the user sees while the program runs, on a terminal or in a notebook."""
