"""Token trees on the device: growth, merge, selection, and the walk that verifies them."""
