"""Search spaces of other systems, over the layers of a model and the prices of this project."""
