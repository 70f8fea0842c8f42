"""How a network behaves: accuracy, and what becomes of it on other images."""
