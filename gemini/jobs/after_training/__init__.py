"""What is done with a trained model: adapters are merged, texts are sampled, files are exported."""
