"""What the documents' library does otherwise than ours: its defaults and its signatures over our parts."""
