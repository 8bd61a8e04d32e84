"""A second device for tests: "far", whose memory the host cannot touch, where there is no accelerator."""
