"""What other draft settings would have done, told from one traced run without the model."""
