"""Side-by-side measurements of the ways to hold a prompt's rows, and how they are written down."""
