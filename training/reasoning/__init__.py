"""The reasoning language measured: what is prose, what a response is judged on, figures and pictures."""
