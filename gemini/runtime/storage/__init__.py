"""The chunks that hold each part of a model: parameters, gradients and optimizer states."""
