"""Files of models, optimizers and schedulers: safetensors and JSON, without pickle."""
