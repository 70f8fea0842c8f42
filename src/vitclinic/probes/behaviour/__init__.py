"""Behaviour: what a network answers, to images as they are and to changed ones."""
