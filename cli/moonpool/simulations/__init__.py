"""The simulations of `moonpool simulate`: arguments and printing; what is simulated is `simulator`'s."""
