"""Weight-only products: activations of 16 bits times weights of 2 to 8 bits, and how the weights lie."""
