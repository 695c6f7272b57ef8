"""Steps: their order, recorded, planned and followed, and what is measured of them."""
