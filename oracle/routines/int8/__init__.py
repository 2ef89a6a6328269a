"""Int8: quantisers with and without a zero point, and the product that subtracts it."""
