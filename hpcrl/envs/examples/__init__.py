"""Agent programs to begin with; each is an ordinary program that knows nothing of hpcrl."""
