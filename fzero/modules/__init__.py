"""`fz.functional` works on a private copy of an nn.Module, which leads nowhere to the original."""
