"""What `fz.functional` does with an nn.Module: a private copy that leads nowhere to the original."""
