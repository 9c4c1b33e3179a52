"""A run on mini-batches, as Lightning sees it."""
