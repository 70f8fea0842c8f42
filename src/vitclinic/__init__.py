"""vitclinic: train vision transformers that work on the data you have, and see why."""
