"""What knows nothing of steps: pytrees, private torch, random streams, nodes of a derivative, refusals."""
