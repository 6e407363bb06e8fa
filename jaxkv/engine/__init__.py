"""The bridge: the only place that sees both the host and the device half."""
