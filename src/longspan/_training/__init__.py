"""Demo and training support for the command line and the examples: a small decoder, a corpus, ranks, a training job."""
