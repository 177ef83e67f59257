"""Replacement forwards for single modules: same arguments as the forward they replace, no state of their own."""
