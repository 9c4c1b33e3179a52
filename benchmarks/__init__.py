"""How fast the library is, next to what people use instead. Run: python -m benchmarks"""
