"""Search spaces of other planning systems, with the layers, costs and prices of this project."""
