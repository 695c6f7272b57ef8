"""Planning by operators: every operator of a captured step gets layouts of its own."""
