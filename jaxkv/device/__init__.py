"""Computation: arrays and pure functions over them. Never imports the host half."""
