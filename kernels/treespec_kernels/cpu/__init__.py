"""C++ compiled on the user's machine: decoder passes, tree growth, prompt lookup."""
