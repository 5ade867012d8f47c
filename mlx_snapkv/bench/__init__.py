"""Side-by-side measurements of the ways to hold a prompt's entries, and how they are written down."""
