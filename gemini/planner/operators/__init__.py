"""Plans every operator of a captured step separately: each one gets its own layouts."""
