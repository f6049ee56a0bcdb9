"""Simulators that hpcrl doesn't know: programs that speak the protocol of `external:`."""
