"""Ready-made programs over the runtime, one folder each."""
