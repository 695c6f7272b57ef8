"""Search spaces of other planning systems, with the layers, figures and prices of this project."""
