"""What a run did, counted and put into words."""
