"""Several Macs that hold one model together: which part is here, and what they have to tell each other."""
