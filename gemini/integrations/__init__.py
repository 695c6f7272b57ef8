"""The trainers and libraries that people use: each file imports its own only when it is imported."""
