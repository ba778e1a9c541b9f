"""What one layer and one link cost, and where that figure came from."""
