"""A byte-level language model trained on two ranks, eager against compiled with flux_inductor."""
