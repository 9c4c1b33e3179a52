"""The strongest simple methods that are not bilevel, on the library's own splits."""
