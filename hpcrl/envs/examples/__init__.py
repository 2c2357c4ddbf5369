"""Agent programs to start from; each is an ordinary program that does not use hpcrl."""
