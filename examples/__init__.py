"""Examples of the library's use."""
