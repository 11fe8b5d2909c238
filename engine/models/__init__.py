"""What a model is: its specification, families, file and forward pass."""
