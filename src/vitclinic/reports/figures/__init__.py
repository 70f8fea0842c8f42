"""One file a probe: how its measurements are drawn, as the papers draw them."""
