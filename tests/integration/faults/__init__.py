"""Faults that the service must survive; `make faults` plays all of them."""
