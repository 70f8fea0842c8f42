"""Tasks: what a training run learns."""
