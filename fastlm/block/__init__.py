"""A decoder layer as one autograd function with a hand-written backward and a plan of what it keeps."""
