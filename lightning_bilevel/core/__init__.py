"""What a bilevel problem is, and what is true of a point."""
