"""What a policy kept of a prompt, and where its answer looked: as arrays, a page and a picture."""
