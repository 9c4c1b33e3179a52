"""Examples of the library's use, and its benchmarks."""
