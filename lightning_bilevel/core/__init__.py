"""The bilevel problem, and how well a point solves it."""
