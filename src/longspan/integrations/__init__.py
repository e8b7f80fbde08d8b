"""What stands between the engine and a model: batches, the loss, transformers, a small decoder to train."""
